"""The controller's web application: the loop as its background task, the routes in front."""

from controller.app.build import create_app

__all__ = ["create_app"]
