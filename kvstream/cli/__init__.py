"""The `kvstream` command. Each subcommand is a module with `add_arguments(parser)` and `run(args) -> exit code`."""
