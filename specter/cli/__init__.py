"""The command `specter`: one module per subcommand."""
