"""Where runs are executed: `engine` says what an engine is, and each of the others is one."""
