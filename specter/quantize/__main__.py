from specter.quantize.cli import main

main()
