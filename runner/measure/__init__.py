"""What is a stage worth on this machine?"""
