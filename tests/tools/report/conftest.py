from run_folders import write_run  # noqa: F401, a fixture
