" Settings of plans: `gq` and `=` lay them out by `commplan fmt`, `:make` checks them.
if exists("b:did_ftplugin")
  finish
endif
let b:did_ftplugin = 1

setlocal commentstring=#\ %s comments=:#
setlocal expandtab shiftwidth=4 softtabstop=4
setlocal suffixesadd=.plan
setlocal equalprg=commplan\ fmt\ -
setlocal makeprg=commplan\ check\ --format\ concise\ %:S
setlocal errorformat=%f:%l:%c:\ %trror[%m,%f:%l:%c:\ %tarning[%m

let b:undo_ftplugin = "setlocal commentstring< comments< expandtab< shiftwidth< softtabstop< suffixesadd<"
let b:undo_ftplugin .= " equalprg< makeprg< errorformat<"
