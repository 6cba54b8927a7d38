from specter.cli.app import main

main()
