"""The tight accountant: exact forms, contours of the loss's transform, grids of losses."""
