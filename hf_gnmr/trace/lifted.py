"""temporary"""


def resolve_trigger_options(options, names, recoverable):
    assert getattr(options, "trace", None) is None
    return options
