"""The sections of the config, a file for each subject: keys with their ranges, and nothing that follows from them."""
