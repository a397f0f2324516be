//! Compares two trees, field by field.

use std::collections::BTreeSet;

use serde_json::Value;

/// A field whose value differs from the recorded one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    /// Path of the field: `containers/0/config/tty`.
    pub path: String,
    /// Value of the kubelet, if any.
    pub kubelet: Option<String>,
    /// Value of Quintlet, if any.
    pub ours: Option<String>,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let or_nothing = |v: &Option<String>| v.clone().unwrap_or_else(|| "nothing".to_owned());
        write!(f, "{}: kubelet {}, ours {}", self.path, or_nothing(&self.kubelet), or_nothing(&self.ours))
    }
}

/// Returns all differences, by path.
#[must_use]
pub fn differences(kubelet: &Value, ours: &Value) -> Vec<Difference> {
    let mut out = Vec::new();
    walk("", Some(kubelet), Some(ours), &mut out);
    out
}

fn walk(path: &str, kubelet: Option<&Value>, ours: Option<&Value>, out: &mut Vec<Difference>) {
    let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}/{key}") };
    match (kubelet, ours) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                walk(&below(key), a.get(key), b.get(key), out);
            }
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            for n in 0..a.len().max(b.len()) {
                walk(&below(&n.to_string()), a.get(n), b.get(n), out);
            }
        }
        (a, b) if a == b => {}
        (a, b) => out.push(Difference {
            path: path.to_owned(),
            kubelet: a.map(ToString::to_string),
            ours: b.map(ToString::to_string),
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_field_that_differs_is_named_with_both_values() {
        let kubelet = json!({"a": [1, {"b": "x"}], "c": {}, "same": [null]});
        let ours = json!({"a": [1, {"b": "y"}, 3], "d": false, "same": [null]});
        let got: Vec<String> = differences(&kubelet, &ours).iter().map(ToString::to_string).collect();
        assert_eq!(
            got,
            [
                r#"a/1/b: kubelet "x", ours "y""#,
                "a/2: kubelet nothing, ours 3",
                "c: kubelet {}, ours nothing",
                "d: kubelet nothing, ours false",
            ]
        );
    }
}
