//! `$(NAME)` in commands, arguments and values (third_party/forked/golang/expansion).

/// Expands references; `lookup` gives the text that stands for a name. `$$` is a dollar sign, an unterminated
/// `$(` stays, and what a value contains is not expanded again.
pub fn expand(input: &str, mut lookup: impl FnMut(&str) -> String) -> String {
    let mut out = String::with_capacity(input.len());
    let mut rest = input;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let tail = &rest[at + 1..];
        rest = match tail.as_bytes().first() {
            None => {
                out.push('$');
                tail
            }
            Some(b'$') => {
                out.push('$');
                &tail[1..]
            }
            Some(b'(') => match tail.find(')') {
                Some(end) => {
                    out.push_str(&lookup(&tail[1..end]));
                    &tail[end + 1..]
                }
                None => {
                    out.push_str("$(");
                    &tail[1..]
                }
            },
            Some(_) => {
                out.push('$');
                tail
            }
        };
    }
    out.push_str(rest);
    out
}

/// Expands against variables; an unknown name stays as written.
pub fn expand_known<'a>(input: &str, get: impl Fn(&str) -> Option<&'a str>) -> String {
    expand(input, |name| get(name).map_or_else(|| format!("$({name})"), str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_expand_once_and_only_when_known() {
        let get = |name: &str| match name {
            "A" => Some("a"),
            "B" => Some("$(A)"),
            "EMPTY" => Some(""),
            _ => None,
        };
        for (input, want) in [
            ("", ""),
            ("plain", "plain"),
            ("$(A)", "a"),
            ("x$(A)y$(A)", "xaya"),
            ("$(B)", "$(A)"),
            ("$(EMPTY)|", "|"),
            ("$(NONE)", "$(NONE)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$a"),
            ("$$$$(A)", "$$(A)"),
            ("$(A", "$(A"),
            ("$(A$(A)", "$(A$(A)"),
            ("$", "$"),
            ("a$", "a$"),
            ("$A", "$A"),
            ("$é$(A)", "$éa"),
            ("$()", "$()"),
            ("$((A))", "$((A))"),
        ] {
            assert_eq!(expand_known(input, get), want, "{input}");
        }
    }
}
