"""The comparison bound to recipes: do their stages keep what they promise?"""
