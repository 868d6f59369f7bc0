"""Sources of records: folders and files, data sets of other libraries, and the conversion of records."""
