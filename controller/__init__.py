"""The controller: watches workers, decides the speculation depth, and actuates it over HTTP."""
