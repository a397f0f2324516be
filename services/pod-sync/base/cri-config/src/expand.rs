//! Expands `$(NAME)` in commands, arguments and values (`third_party/forked/golang/expansion`).
//!
//! A reference of five bytes can expand to a value of any length, to which further values can refer. A
//! [`Budget`] therefore limits the expanded bytes.

use super::error::ConfigError;

/// Limit of the variables of a container, and of its command with arguments, in bytes each. `execve(2)`
/// refuses more than 6 MiB of both (Linux `fs/exec.c: bprm_stack_limits`), and a CRI message has 16 MiB.
pub const MAX_EXPANDED_BYTES: usize = 6 << 20;

/// The bytes that expanded texts of a container may still take.
#[derive(Debug, Clone)]
pub struct Budget {
    left: usize,
    limit: usize,
    texts: &'static str,
}

impl Budget {
    /// Returns a budget of [`MAX_EXPANDED_BYTES`]. `texts` names the texts in errors.
    #[must_use]
    pub fn new(texts: &'static str) -> Self {
        Self::with_limit(MAX_EXPANDED_BYTES, texts)
    }

    /// Returns a budget of `limit` bytes.
    #[must_use]
    pub fn with_limit(limit: usize, texts: &'static str) -> Self {
        Self { left: limit, limit, texts }
    }

    /// Takes bytes from the budget.
    ///
    /// # Errors
    /// Fewer are left.
    pub fn take(&mut self, bytes: usize) -> Result<(), ConfigError> {
        let too_long = || ConfigError::invalid(format!("{} take more than {} bytes", self.texts, self.limit));
        self.left = self.left.checked_sub(bytes).ok_or_else(too_long)?;
        Ok(())
    }

    /// Returns an expanded text. The invalid bytes are not reported, since they may be secret.
    ///
    /// # Errors
    /// It is not UTF-8.
    pub fn text(&self, expanded: Vec<u8>) -> Result<String, ConfigError> {
        let error = |_| {
            ConfigError::invalid(format!("{}: a variable that is expanded is not UTF-8 text", self.texts))
        };
        String::from_utf8(expanded).map_err(error)
    }
}

/// Expands references. `lookup` returns the value of a name, which need not be text. `$$` becomes a dollar
/// sign, an unterminated `$(` stays, and values are not expanded again. Time is linear in input and output.
///
/// # Errors
/// The result exceeds the budget.
pub fn expand(
    input: &str,
    budget: &mut Budget,
    mut lookup: impl FnMut(&str) -> Vec<u8>,
) -> Result<Vec<u8>, ConfigError> {
    // Every byte of the input yields at most one byte, except for references.
    budget.take(input.len())?;
    let mut out = Vec::with_capacity(input.len());
    let mut rest = input;
    let mut terminated = true;
    while let Some((plain, tail)) = rest.split_once('$') {
        out.extend_from_slice(plain.as_bytes());
        rest = tail;
        if let Some(behind) = tail.strip_prefix('$') {
            out.push(b'$');
            rest = behind;
        } else if let Some(inside) = tail.strip_prefix('(') {
            // Once no `)` follows, none is searched for again.
            let reference = if terminated { inside.split_once(')') } else { None };
            match reference {
                Some((name, behind)) => {
                    let value = lookup(name);
                    budget.take(value.len())?;
                    out.extend_from_slice(&value);
                    rest = behind;
                }
                None => {
                    terminated = false;
                    out.extend_from_slice(b"$(");
                    rest = inside;
                }
            }
        } else {
            out.push(b'$');
        }
    }
    out.extend_from_slice(rest.as_bytes());
    Ok(out)
}

/// Expands references to variables. An unknown name stays as written.
///
/// # Errors
/// See [`expand`].
pub fn expand_known<'a>(
    input: &str,
    budget: &mut Budget,
    get: impl Fn(&str) -> Option<&'a [u8]>,
) -> Result<Vec<u8>, ConfigError> {
    expand(input, budget, |name| get(name).map_or_else(|| format!("$({name})").into_bytes(), <[u8]>::to_vec))
}

/// Expands references to variables in a text that the CRI carries as a string.
///
/// # Errors
/// See [`expand`]. A value is not UTF-8.
pub fn expand_text<'a>(
    input: &str,
    budget: &mut Budget,
    get: impl Fn(&str) -> Option<&'a [u8]>,
) -> Result<String, ConfigError> {
    let expanded = expand_known(input, budget, get)?;
    budget.text(expanded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_references_expand_and_only_once() {
        let get = |name: &str| match name {
            "A" => Some(&b"a"[..]),
            "B" => Some(&b"$(A)"[..]),
            "EMPTY" => Some(&b""[..]),
            "BYTES" => Some(&b"A\xff"[..]),
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
            let got = expand_text(input, &mut Budget::new("texts"), get).unwrap();
            assert_eq!(got, want, "{input}");
        }
        assert_eq!(expand_known("<$(BYTES)>", &mut Budget::new("texts"), get).unwrap(), b"<A\xff>");
        let error = expand_text("<$(BYTES)>", &mut Budget::new("the texts"), get).unwrap_err();
        assert_eq!(error.to_string(), "the texts: a variable that is expanded is not UTF-8 text");
    }

    #[test]
    fn unterminated_references_take_linear_time_and_long_values_are_limited() {
        let open = "$(".repeat(1 << 20);
        let began = tokio::time::Instant::now();
        assert_eq!(expand_known(&open, &mut Budget::new("texts"), |_| None).unwrap(), open.as_bytes());
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
        let long = "x".repeat(1 << 20);
        let value = "$(A)".repeat(1 << 18);
        let error =
            expand_known(&value, &mut Budget::new("the texts"), |_| Some(long.as_bytes())).unwrap_err();
        assert_eq!(error.to_string(), "the texts take more than 6291456 bytes");
    }
}
