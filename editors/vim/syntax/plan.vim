" Vim syntax file of commplan plans, written by `make grammars` from the lists of the language.
if exists("b:current_syntax")
  finish
endif

syntax case match
syntax iskeyword @,48-57,_
syntax match planNumber "\v<\d[0-9_]*(\.[0-9_]*)?([eE][+-]?\d+)?" nextgroup=planUnit skipwhite
syntax match planUnit "\v(Gbit/s|Mbit/s|GB/s|GiB|KiB|MiB|ms|us|s)>" contained
syntax match planMark "->\|[=?]"
syntax keyword planDeclaration axis ensemble input plan server source state topology
syntax keyword planDeclaration fn nextgroup=planFunction skipwhite
syntax keyword planPhase at each every phase
syntax match planPhase "\v(<at\s+)@<=start>|(<each\s+)@<=step>|(<every\s+\d+\s+)@<=steps>"
syntax match planPhase "\v(<steps\s+)@<=in>|(<in\s+\d+\s+)@<=fragments>"
syntax match planPhase "\v(<(steps|fragments)\s+)@<=hidden>|(<hidden\s+)@<=under>"
syntax match planPhase "\v(<under\s+\d+\s+)@<=steps?>"
syntax keyword planStage broadcast elastic exchange gather load reduce scatter share shift slice swap
syntax keyword planStage map nextgroup=planFunction skipwhite
syntax keyword planClause across from into over partial per seed split with output
syntax match planClause "\v<batch>\ze\s*[0-9[]"
syntax keyword planClause via nextgroup=planAlgorithm skipwhite
syntax keyword planClause by nextgroup=planOperator skipwhite
syntax keyword planClause visit tail nextgroup=planConstant skipwhite
syntax keyword planClause on nextgroup=planPlace skipwhite
syntax match planClause "\v((:\s*)@<=\h\w*(\[[^]]*\])?\s+)@<=same>"
syntax match planFunction "\v<\h\w*>" contained
syntax match planFunction "\v(<exchange>.*<with\s+)@<=\h\w*>"
syntax match planFunction "\v(<fn\s.*\=\s*)@<=(nesterov|subtract|blend|scale|zeros|cast|add|sgd)>"
syntax match planType "\v((:|,|\(|-\>)\s*)@<=(bytes|bf16|bool|tree|f16|f32|f64|i16|i32|i64|u16|u32|i8|u8)>"
syntax match planConstant "\v<(at_least_once|at_most_once|exactly_once|short|drop|pad)>" contained
syntax match planPlace "\v<(device|host)>(\s+(elementwise|linear|random)>)*" contained
syntax match planAlgorithm "\v<(recursive_doubling|halving_doubling|parameter_server|single_broadcast|multi_broadcast|scatter_gather|binomial_tree|hierarchical|double_tree|all_shared|duplicate|pairwise|native|bruck|chain|torus|ring)>" contained
syntax match planAlgorithm "\v(\=\s*)@<=(recursive_doubling|halving_doubling|parameter_server|single_broadcast|multi_broadcast|scatter_gather|binomial_tree|hierarchical|double_tree|all_shared|duplicate|pairwise|native|bruck|chain|torus|ring)>"
syntax match planOperator "\v<(round_robin|hogwild|async|mean|sync|max|min|sum)>" contained
syntax match planOption "\v<(device_prefetch|accumulate|on_failure|staleness|integers|on_error|prefetch|overlap|readers|bucket|owners|weight|within|cache|chunk|cores|wire|eta|rho)>\ze\s*\="
syntax match planOption "\v(<fn\s.*)@<=<(momentum|factor|alpha|dtype|rate)>\ze\s*\="
syntax match planConstant "\v(\=\s*)@<=(backward|continue|f8e4m3|first|bf16|disk|int4|int8|skip|stop|f16|f32|f64|max)>"
syntax match planType "\v(<dtype\s*\=\s*)@<=(bytes|bf16|bool|tree|f16|f32|f64|i16|i32|i64|u16|u32|i8|u8)>"
syntax match planText /"[^"]*"/
syntax match planComment "#.*$" contains=@Spell

highlight default link planComment Comment
highlight default link planDeclaration StorageClass
highlight default link planPhase Keyword
highlight default link planStage Statement
highlight default link planClause Keyword
highlight default link planType Type
highlight default link planConstant Constant
highlight default link planPlace Constant
highlight default link planFunction Function
highlight default link planAlgorithm Special
highlight default link planOperator Special
highlight default link planOption Identifier
highlight default link planNumber Number
highlight default link planUnit Type
highlight default link planText String
highlight default link planMark Operator

let b:current_syntax = "plan"
