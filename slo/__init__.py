"""SLOs: what an application uses of them. The controller's parts are in the submodules."""
