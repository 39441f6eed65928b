"""The admin API, `/admin/v1`: `api` has the routes, one file a noun behind it."""
