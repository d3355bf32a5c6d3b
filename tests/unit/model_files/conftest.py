from model_folders import folder, make_folder

__all__ = ["folder", "make_folder"]
