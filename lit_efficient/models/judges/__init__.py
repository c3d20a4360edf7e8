"""Distances between sets of images and between two images, in the features of a network."""
