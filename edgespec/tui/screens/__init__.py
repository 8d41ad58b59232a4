"""The other screens of the terminal chat: help, models, settings, tools, races and dialogs."""
