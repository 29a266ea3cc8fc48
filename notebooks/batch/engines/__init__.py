"""Where runs are executed: `engine` defines the interface of an engine, and each other module holds one."""
