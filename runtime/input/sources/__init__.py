"""Where records come from: folders and files, data sets of other libraries, and the conversion of records."""
