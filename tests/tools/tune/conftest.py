from tuning_target import short  # noqa: F401, a fixture
