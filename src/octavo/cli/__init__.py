"""The command `octavo`: one module per subcommand, imported when it is called."""
