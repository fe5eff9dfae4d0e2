from study_folder import no_figures, study  # noqa: F401, fixtures
