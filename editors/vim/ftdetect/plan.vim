" A file NAME.plan is a commplan plan.
autocmd BufRead,BufNewFile *.plan setfiletype plan
