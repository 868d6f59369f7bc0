" Settings of plans: `:PlanFormat` lays one out by `commplan fmt`, `:make` checks it.
if exists("b:did_ftplugin")
  finish
endif
let b:did_ftplugin = 1

setlocal commentstring=#\ %s comments=:#
setlocal expandtab shiftwidth=4 softtabstop=4
setlocal suffixesadd=.plan
setlocal makeprg=commplan\ check\ --format\ concise\ %:S
setlocal errorformat=%f:%l:%c:\ %trror[%m,%f:%l:%c:\ %tarning[%m

" The whole plan, or nothing of it where it does not parse.
function! s:Format() abort
  let l:lines = systemlist("commplan fmt -", getline(1, "$"))
  if v:shell_error
    echohl ErrorMsg | echomsg "commplan fmt: the plan has errors, :make lists them" | echohl None
  elseif l:lines !=# getline(1, "$")
    let l:view = winsaveview()
    silent keepjumps call deletebufline("%", len(l:lines) + 1, "$")
    keepjumps call setline(1, l:lines)
    call winrestview(l:view)
  endif
endfunction
command! -buffer PlanFormat call s:Format()

let b:undo_ftplugin = "setlocal commentstring< comments< expandtab< shiftwidth< softtabstop< suffixesadd<"
let b:undo_ftplugin .= " makeprg< errorformat< | delcommand -buffer PlanFormat"
