"""What the plugin raises for bad input."""


class ConfigurationError(RuntimeError):
    """A setting or a combination of settings that cannot be served.

    The message is one sentence that names the field, what was given and what is allowed. Not a ValueError: pydantic
    would bury a ValueError raised while vLLM validates its own configuration.
    """
