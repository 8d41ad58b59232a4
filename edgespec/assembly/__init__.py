"""From references and options to a Runtime: found, planned, loaded, and given what drafts for it."""
