"""The command line: one file a noun; it speaks HTTP to a gateway and never imports the app."""


def main() -> None:
    """The console script `loraplex`. (Imported late: a package's `__init__` imports nothing.)"""
    from gateway.cli.root import run

    run()
