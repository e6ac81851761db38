//! Puts every mutant of a source file into it at once: each behind a test of its number, so that one build has them all.

use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{parse_quote, BinOp, Expr, ItemFn, Pat, Stmt};

/// A change of one place.
#[derive(Clone)]
pub struct Mutant {
    pub line: usize,
    pub key: Key,
}

/// Which change it is, whatever is edited elsewhere in the file.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub file: String,
    /// The function that has it.
    pub within: String,
    pub what: String,
}

impl Key {
    pub fn name(&self) -> String {
        format!("{} in `{}`: {}", self.file, self.within, self.what)
    }
}

/// Rewrites files; numbers go on from one to the next.
#[derive(Default)]
pub struct Rewriter {
    pub mutants: Vec<Mutant>,
    /// Numbers that did not compile.
    pub without: BTreeSet<usize>,
    file: String,
    /// The function that is rewritten.
    within: String,
    /// Number of changes so far with this key: the second one in a function is called so.
    same: BTreeMap<Key, u32>,
    /// How this crate names the function that says which mutant is on.
    is: Option<syn::Path>,
}

#[derive(Clone, Copy, PartialEq)]
enum Returns {
    Unit,
    Bool,
    Other,
}

impl Rewriter {
    pub fn file(&mut self, name: &str, text: &str, is: &str) -> syn::Result<String> {
        let mut tree = syn::parse_file(text)?;
        self.file = name.to_string();
        self.is = Some(syn::parse_str(is)?);
        self.visit_file_mut(&mut tree);
        Ok(tree.into_token_stream().to_string())
    }

    /// The test of a new number, if it is to be there.
    fn number(&mut self, line: usize, what: String) -> Option<Expr> {
        let n = self.mutants.len();
        let mut key = Key {
            file: self.file.clone(),
            within: self.within.clone(),
            what,
        };
        let same = self.same.entry(key.clone()).or_default();
        *same += 1;
        if *same > 1 {
            key.what += &format!(" ({same})");
        }
        self.mutants.push(Mutant { line, key });
        let number = n as u32;
        let is = self.is.as_ref().expect("set with the file");
        (!self.without.contains(&n)).then(|| parse_quote!(#is(#number)))
    }

    /// A condition that is always true, or always false.
    fn condition(&mut self, e: &mut Expr, (line, text): &(usize, String), may_be_true: bool) {
        if has_let(e) {
            return;
        }
        if may_be_true {
            if let Some(is) = self.number(*line, format!("`{text}` is true")) {
                *e = parse_quote!((#is || (#e)));
            }
        }
        if let Some(is) = self.number(*line, format!("`{text}` is false")) {
            *e = parse_quote!((!#is && (#e)));
        }
    }

    fn binary(&mut self, e: &mut Expr, (line, text): &(usize, String)) {
        let Expr::Binary(b) = e else { return };
        let Some(op) = other(&b.op) else { return };
        if has_let(&b.left) || has_let(&b.right) {
            return;
        }
        let what = format!("`{}` for `{}` in `{text}`", short(&op), short(&b.op));
        let mut changed = b.clone();
        changed.op = op;
        if let Some(is) = self.number(*line, what) {
            *e = parse_quote!((if #is { #changed } else { #b }));
        }
    }

    fn body(&mut self, f: &syn::Signature, block: &mut syn::Block) {
        let line = line_of(&f.ident);
        let said = says(block);
        for (of, value, text) in [
            (Returns::Unit, parse_quote!(return), "does nothing"),
            (Returns::Bool, parse_quote!(return true), "says true"),
            (Returns::Bool, parse_quote!(return false), "says false"),
        ] {
            let value: Expr = value;
            // (What it does or says anyway is no change.)
            if returns(f) == of && said != Some(short(&value)) {
                if let Some(is) = self.number(line, format!("`{}` {text}", f.ident)) {
                    block.stmts.insert(0, parse_quote!(if #is { #value; }));
                }
            }
        }
    }

    fn function(&mut self, f: &syn::Signature, attrs: &[syn::Attribute], block: &mut syn::Block) {
        if f.constness.is_some() || is_test(attrs) {
            return;
        }
        let outer = std::mem::replace(&mut self.within, f.ident.to_string());
        self.visit_block_mut(block);
        self.body(f, block);
        self.within = outer;
    }
}

impl VisitMut for Rewriter {
    fn visit_item_fn_mut(&mut self, f: &mut ItemFn) {
        self.function(&f.sig, &f.attrs, &mut f.block);
    }

    fn visit_impl_item_fn_mut(&mut self, f: &mut syn::ImplItemFn) {
        self.function(&f.sig, &f.attrs, &mut f.block);
    }

    fn visit_item_mod_mut(&mut self, m: &mut syn::ItemMod) {
        if !is_test(&m.attrs) {
            visit_mut::visit_item_mod_mut(self, m);
        }
    }

    // Constants, types and patterns want constant expressions.
    fn visit_item_const_mut(&mut self, _: &mut syn::ItemConst) {}
    fn visit_impl_item_const_mut(&mut self, _: &mut syn::ImplItemConst) {}
    fn visit_item_static_mut(&mut self, _: &mut syn::ItemStatic) {}
    fn visit_type_mut(&mut self, _: &mut syn::Type) {}
    fn visit_pat_mut(&mut self, _: &mut Pat) {}
    fn visit_variant_mut(&mut self, _: &mut syn::Variant) {}
    fn visit_attribute_mut(&mut self, _: &mut syn::Attribute) {}

    fn visit_expr_repeat_mut(&mut self, r: &mut syn::ExprRepeat) {
        self.visit_expr_mut(&mut r.expr);
    }

    fn visit_stmt_mut(&mut self, s: &mut Stmt) {
        let (line, text) = (line_of(s), short(s));
        visit_mut::visit_stmt_mut(self, s);
        let leaves = match s {
            Stmt::Expr(e, Some(_)) => match e {
                Expr::MethodCall(_) | Expr::Call(_) | Expr::Try(_) => true,
                Expr::Assign(a) => !matches!(*a.left, Expr::Path(_)),
                Expr::Binary(b) => is_assignment(&b.op),
                _ => false,
            },
            Stmt::Local(l) => matches!(l.pat, Pat::Wild(_)) && l.init.is_some(),
            _ => false,
        };
        if leaves {
            if let Some(is) = self.number(line, format!("without `{text}`")) {
                *s = parse_quote!(if !#is { #s });
            }
        }
    }

    fn visit_arm_mut(&mut self, a: &mut syn::Arm) {
        let text = a.guard.as_ref().map(|(_, g)| (line_of(g), short(g)));
        visit_mut::visit_arm_mut(self, a);
        if let (Some((_, guard)), Some(text)) = (&mut a.guard, text) {
            self.condition(guard, &text, true);
        }
    }

    fn visit_expr_mut(&mut self, e: &mut Expr) {
        let text = match e {
            Expr::Binary(b) => (line_of(&b.op), short(e)),
            Expr::Unary(_) => (line_of(e), short(e)),
            Expr::If(i) => (line_of(&i.cond), short(&i.cond)),
            Expr::While(w) => (line_of(&w.cond), short(&w.cond)),
            _ => (0, String::new()),
        };
        visit_mut::visit_expr_mut(self, e);
        match e {
            Expr::Binary(_) => self.binary(e, &text),
            Expr::If(i) => self.condition(&mut i.cond, &text, true),
            Expr::While(w) => self.condition(&mut w.cond, &text, false),
            Expr::Unary(u) if matches!(u.op, syn::UnOp::Not(_)) => {
                let inner = u.expr.clone();
                let (line, text) = &text;
                if let Some(is) = self.number(*line, format!("`{text}` without `!`")) {
                    *e = parse_quote!((if #is { #inner } else { #e }));
                }
            }
            Expr::Match(m) => {
                // An arm may go if the last one takes everything.
                let all = matches!(m.arms.last(), Some(l) if matches!(l.pat, Pat::Wild(_)) && l.guard.is_none());
                let n = m.arms.len() - usize::from(all);
                let arms = m.arms.iter_mut().take(if all { n } else { 0 });
                for a in arms.filter(|a| a.guard.is_none()) {
                    let (line, text) = (line_of(&a.pat), short(&a.pat));
                    if let Some(is) = self.number(line, format!("without the arm `{text}`")) {
                        a.guard = Some((Default::default(), Box::new(parse_quote!(!#is))));
                    }
                }
            }
            _ => {}
        }
    }
}

/// What a function returns that does nothing else.
fn says(block: &syn::Block) -> Option<String> {
    match block.stmts.as_slice() {
        [] => Some("return".to_string()),
        [Stmt::Expr(Expr::Lit(l), None)] => Some(format!("return {}", short(l))),
        _ => None,
    }
}

/// Before it is rewritten: what is put there has no place in the file.
fn line_of(t: &impl Spanned) -> usize {
    t.span().start().line
}

fn returns(f: &syn::Signature) -> Returns {
    match &f.output {
        syn::ReturnType::Default => Returns::Unit,
        syn::ReturnType::Type(_, t) => match &**t {
            syn::Type::Path(p) if p.path.is_ident("bool") => Returns::Bool,
            _ => Returns::Other,
        },
    }
}

fn other(op: &BinOp) -> Option<BinOp> {
    Some(match op {
        BinOp::Lt(_) => parse_quote!(<=),
        BinOp::Le(_) => parse_quote!(<),
        BinOp::Gt(_) => parse_quote!(>=),
        BinOp::Ge(_) => parse_quote!(>),
        BinOp::Eq(_) => parse_quote!(!=),
        BinOp::Ne(_) => parse_quote!(==),
        BinOp::And(_) => parse_quote!(||),
        BinOp::Or(_) => parse_quote!(&&),
        BinOp::Add(_) => parse_quote!(-),
        BinOp::Sub(_) => parse_quote!(+),
        BinOp::BitAnd(_) => parse_quote!(|),
        BinOp::BitOr(_) => parse_quote!(&),
        _ => return None,
    })
}

fn is_assignment(op: &BinOp) -> bool {
    matches!(
        op,
        BinOp::AddAssign(_) | BinOp::SubAssign(_) | BinOp::BitOrAssign(_) | BinOp::BitAndAssign(_)
    )
}

/// Does it bind names, so that what follows in a chain needs it?
fn has_let(e: &Expr) -> bool {
    match e {
        Expr::Let(_) => true,
        Expr::Binary(b) => has_let(&b.left) || has_let(&b.right),
        _ => false,
    }
}

fn is_test(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|a| {
        a.path().is_ident("cfg") && {
            let text = a.meta.to_token_stream().to_string();
            text.contains("test") || text.contains("loom") && !text.contains("not")
        }
    })
}

/// Tokens, as somebody would write them, and not too many.
fn short(t: &impl ToTokens) -> String {
    let mut s = t.to_token_stream().to_string();
    for (a, b) in [
        (" . ", "."),
        (" :: ", "::"),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        (" ,", ","),
        ("& ", "&"),
        ("! ", "!"),
        (" ;", ";"),
        (" ?", "?"),
    ] {
        s = s.replace(a, b);
    }
    match s.char_indices().nth(90) {
        Some((at, _)) => format!("{}…", &s[..at]),
        None => s,
    }
}
