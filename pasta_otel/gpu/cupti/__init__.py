"""GPU capture by CUPTI: windows of activity records, joined to spans by id."""
