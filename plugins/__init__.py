"""The built-in plugins, installed as ``runner.plugins``."""

if __name__ == "plugins":
    raise ImportError("the built-in plugins are imported as 'runner.plugins', never as 'plugins'")
