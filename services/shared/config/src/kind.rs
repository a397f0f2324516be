//! The types of fields: checks of values, and conversion from and to flags.

use quintlet_model::go_duration;

use crate::checks::InvalidText;
use crate::diagnostics::Diagnostic;
use crate::node::{Data, LocatedValue, MapEntry, Origin};

/// The type of a field.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number between a minimum and a maximum, both inclusive.
    Int(i64, i64),
    /// A number above the first value and at most the second.
    Number(f64, f64),
    /// A string without further checks.
    Text,
    /// Text that passes a check. The check returns the problem of an invalid text.
    Checked(fn(&str) -> Result<(), InvalidText>),
    /// A path. A relative one is resolved against the directory of the file that contains it.
    Path,
    /// One of these words. Empty text is invalid unless it is listed.
    Word(&'static [&'static str]),
    /// A duration between a minimum and a maximum in nanoseconds, both inclusive.
    Duration(i64, i64),
    /// A duration, or a whole number of nanoseconds, as in the logging fields
    /// (`k8s.io/component-base/logs/api/v1: TimeOrMetaDuration`).
    DurationOrNanos,
    /// A sequence of values of one type.
    List(&'static Kind),
    /// A map with keys that pass a check.
    Map(Keys, &'static Kind),
    /// A list of maps with these fields. The flag marks required fields.
    Objects(&'static [(&'static str, Kind, bool)]),
}

/// The keys that a map may have.
#[derive(Debug, Clone, Copy)]
pub enum Keys {
    /// Any key.
    Any,
    /// These keys. The text describes an unknown key in a message.
    Of(&'static [&'static str], &'static str),
}

/// Any duration that is not negative.
pub const DURATION: Kind = Kind::Duration(0, i64::MAX);
/// Any whole number that is not negative, in the range of the kubelet's type.
pub const COUNT: Kind = Kind::Int(0, i32::MAX as i64);
/// A TCP port, or 0 for none.
pub const PORT_OR_NONE: Kind = Kind::Int(0, 65535);

impl Kind {
    /// Reports the problems of a value.
    pub fn check(&self, node: &LocatedValue, path: &str, out: &mut Vec<Diagnostic>) {
        let mut report = |message: String| out.push(Diagnostic::error(node.origin.clone(), path, message));
        let value = &node.data;
        match (self, value) {
            // A null counts as absent.
            (_, Data::Null) | (Self::Bool, Data::Bool(_)) | (Self::Text, Data::Text(_)) => {}
            (Self::Bool, _) => report(format!("{value}: must be true or false")),
            (Self::Int(min, max), Data::Int(number)) => {
                if number < min {
                    report(format!("{number} is below {min}"));
                } else if number > max {
                    report(format!("{number} is above {max}"));
                }
            }
            (Self::Int(..), _) => report(format!("{value}: must be a whole number")),
            (Self::Number(above, max), Data::Int(_) | Data::Float(_)) => {
                let number = number(value);
                if number <= *above || number > *max {
                    report(format!("{value}: must be more than {above} and at most {max}"));
                }
            }
            (Self::Number(..), _) => report(format!("{value}: must be a number")),
            (Self::Path, Data::Text(text)) => {
                if text.contains('\0') {
                    report(format!("{value}: must not contain NUL"));
                }
            }
            (Self::Checked(check), Data::Text(text)) => {
                if let Err(why) = check(text) {
                    report(format!("{value} {why}"));
                }
            }
            (Self::Word(words), Data::Text(text)) => {
                if !words.contains(&text.as_str()) {
                    let named: Vec<&str> = words.iter().copied().filter(|w| !w.is_empty()).collect();
                    report(format!("{value}: must be {}", or_list(&named)));
                }
            }
            (Self::Duration(..) | Self::DurationOrNanos, Data::Text(text)) => {
                match go_duration::parse(text) {
                    Err(why) => report(format!("{value}: {why}")),
                    Ok(nanos) => {
                        let (min, max) = self.range();
                        if nanos < min {
                            report(format!("{text} is below {}", go_duration::format_short(min)));
                        } else if nanos > max {
                            report(format!("{text} is above {}", go_duration::format_short(max)));
                        }
                    }
                }
            }
            (Self::DurationOrNanos, Data::Int(nanos)) if *nanos >= 0 => {}
            (Self::Duration(..) | Self::DurationOrNanos, Data::Int(number)) => {
                report(format!("{number}: a duration needs a unit, e.g. \"{number}s\""));
            }
            (Self::Duration(..) | Self::DurationOrNanos, _) => {
                report(format!("{value}: must be a duration, e.g. 5s"));
            }
            (
                Self::Text | Self::Path | Self::Checked(_) | Self::Word(_),
                Data::Int(_) | Data::Float(_) | Data::Bool(_),
            ) => report(format!("{value}: must be text, put it in quotes")),
            (Self::Text | Self::Path | Self::Checked(_) | Self::Word(_), _) => {
                report(format!("{value}: must be text"));
            }
            (Self::List(kind), Data::List(elements)) => {
                for (at, element) in elements.iter().enumerate() {
                    kind.check_present(element, &format!("{path}[{at}]"), out);
                }
            }
            (Self::Objects(fields), Data::List(elements)) => {
                for (at, element) in elements.iter().enumerate() {
                    check_object(fields, element, &format!("{path}[{at}]"), out);
                }
            }
            (Self::List(_) | Self::Objects(_), Data::Map(_)) => report("a map: must be a list".to_owned()),
            (Self::List(_) | Self::Objects(_), _) => {
                report(format!("{value}: must be a list, e.g. [{value}]"))
            }
            (Self::Map(keys, kind), Data::Map(entries)) => {
                for entry in entries {
                    let path = format!("{path}.{}", entry.key);
                    if let Keys::Of(known, what) = keys
                        && !known.contains(&entry.key.as_str())
                    {
                        let hint = crate::suggest::hint(&entry.key, known.iter().copied());
                        out.push(Diagnostic::error(entry.origin.clone(), path, format!("{what}{hint}")));
                        continue;
                    }
                    kind.check_present(&entry.value, &path, out);
                }
            }
            (Self::Map(..), _) => report(format!("{value}: must be a map")),
        }
    }

    /// Reports the problems of a list element or a map value, which must not be null.
    fn check_present(&self, node: &LocatedValue, path: &str, out: &mut Vec<Diagnostic>) {
        if node.data == Data::Null {
            out.push(Diagnostic::error(node.origin.clone(), path, "has no value"));
        } else {
            self.check(node, path, out);
        }
    }

    fn range(&self) -> (i64, i64) {
        match self {
            Self::Duration(min, max) => (*min, *max),
            _ => (0, i64::MAX),
        }
    }

    /// Describes valid values, for a message that must not have the invalid one.
    #[must_use]
    pub fn form(&self) -> &'static str {
        match self {
            Self::Map(_, Kind::List(_)) => "a map of lists of text, e.g. {Name: [value]}",
            Self::Map(..) => "a map",
            Self::List(_) | Self::Objects(_) => "a list",
            Self::Text | Self::Path | Self::Checked(_) | Self::Word(_) => "text",
            Self::Bool | Self::Int(..) | Self::Number(..) | Self::Duration(..) | Self::DurationOrNanos => {
                "of the type of the field"
            }
        }
    }

    /// Returns whether the kubelet treats a value as "not set" in a field that is not a pointer: zero or
    /// empty.
    #[must_use]
    pub fn is_zero(&self, node: &LocatedValue) -> bool {
        match (self, &node.data) {
            (_, Data::Null) => true,
            (Self::Int(..) | Self::Number(..) | Self::DurationOrNanos, Data::Int(number)) => *number == 0,
            (Self::Number(..), Data::Float(number)) => *number == 0.0,
            (Self::Duration(..) | Self::DurationOrNanos, Data::Text(text)) => {
                go_duration::parse(text) == Ok(0)
            }
            (Self::Text | Self::Path | Self::Checked(_) | Self::Word(_), Data::Text(text)) => text.is_empty(),
            (Self::List(_) | Self::Objects(_), Data::List(elements)) => elements.is_empty(),
            (Self::Map(..), Data::Map(entries)) => entries.is_empty(),
            _ => false,
        }
    }

    /// Returns the canonical form of a value: durations in their shortest form.
    #[must_use]
    pub fn canonical(&self, mut node: LocatedValue) -> LocatedValue {
        node.data = match (self, node.data) {
            (Self::Duration(..) | Self::DurationOrNanos, Data::Text(text)) => {
                Data::Text(go_duration::parse(&text).map_or(text, go_duration::format_short))
            }
            (Self::DurationOrNanos, Data::Int(nanos)) => Data::Text(go_duration::format_short(nanos)),
            (Self::List(kind), Data::List(elements)) => {
                Data::List(elements.into_iter().map(|e| kind.canonical(e)).collect())
            }
            (Self::Map(_, kind), Data::Map(entries)) => Data::Map(
                entries.into_iter().map(|e| MapEntry { value: kind.canonical(e.value), ..e }).collect(),
            ),
            (_, data) => data,
        };
        node
    }

    /// Converts a checked value to the values of its flag, one per occurrence.
    #[must_use]
    pub fn to_flag(&self, node: &LocatedValue) -> Vec<String> {
        let word = |node: &LocatedValue| match &node.data {
            Data::Text(text) => text.clone(),
            other => other.to_string(),
        };
        match self {
            Self::List(kind) => node.elements().iter().flat_map(|e| kind.to_flag(e)).collect(),
            Self::Map(..) => node
                .entries()
                .iter()
                .flat_map(|e| match &e.value.data {
                    Data::List(values) => values.iter().map(|v| format!("{}: {}", e.key, word(v))).collect(),
                    _ => vec![format!("{}={}", e.key, word(&e.value))],
                })
                .collect(),
            // `1000=30`, or `pattern=4`.
            Self::Objects([(first, Self::Int(..) | Self::Text, _), (second, Self::Int(..), _)]) => {
                let pair =
                    |o: &LocatedValue| [*first, *second].map(|f| o.get(f).map(word).unwrap_or_default());
                node.elements().iter().map(|o| pair(o).join("=")).collect()
            }
            // `0:memory=1Gi,hugepages-2Mi=4Mi`.
            Self::Objects([(first, Self::Int(..), _), (second, map @ Self::Map(..), _)]) => {
                let object = |object: &LocatedValue| {
                    let number = object.get(first).map(word).unwrap_or_default();
                    let amounts = object.get(second).map(|amounts| map.to_flag(amounts)).unwrap_or_default();
                    format!("{number}:{}", amounts.join(","))
                };
                node.elements().iter().map(object).collect()
            }
            Self::Objects(_) => node
                .elements()
                .iter()
                .map(|taint| {
                    let field = |name: &str| taint.get(name).map(word).unwrap_or_default();
                    format!("{}={}:{}", field("key"), field("value"), field("effect"))
                })
                .collect(),
            _ => vec![word(node)],
        }
    }

    /// Converts the occurrences of a flag to a value. Invalid values remain text, so that [`Kind::check`]
    /// reports them.
    #[must_use]
    pub fn from_flag(&self, given: &[String], flag: &str) -> LocatedValue {
        let origin = Origin::Flag(flag.into());
        let node = |data| LocatedValue { data, origin: origin.clone() };
        let text = |text: &str| node(Data::Text(text.to_owned()));
        let items = || given.iter().flat_map(|g| g.split(',')).filter(|g| !g.is_empty());
        let last = given.last().map(String::as_str).unwrap_or_default();
        let data = match self {
            Self::Bool | Self::Int(..) | Self::Number(..) => crate::yaml::plain(last),
            Self::List(kind) => {
                Data::List(items().map(|item| kind.from_flag(&[item.to_owned()], flag)).collect())
            }
            Self::Map(_, Kind::List(_)) => {
                let mut map = node(Data::Map(Vec::new()));
                for header in given {
                    let (name, value) = header.split_once(':').unwrap_or((header.as_str(), ""));
                    let mut values = map.get(name.trim()).map(|v| v.elements().to_vec()).unwrap_or_default();
                    values.push(text(value.trim()));
                    let value = node(Data::List(values));
                    set(&mut map, name.trim(), value);
                }
                map.data
            }
            Self::Map(_, kind) => {
                let mut map = node(Data::Map(Vec::new()));
                for pair in items() {
                    // The kubelet's thresholds are written `memory.available<100Mi`.
                    let (key, value) = pair.split_once(['=', '<']).unwrap_or((pair, ""));
                    let value = kind.from_flag(&[value.to_owned()], flag);
                    set(&mut map, key, value);
                }
                map.data
            }
            Self::Objects(
                [(first, one @ (Self::Int(..) | Self::Text), _), (second, two @ Self::Int(..), _)],
            ) => {
                let pair = |item: &str| {
                    let (left, right) = item.split_once('=').unwrap_or((item, ""));
                    let mut node = node(Data::Map(Vec::new()));
                    node.put(first, one.from_flag(&[left.to_owned()], flag));
                    node.put(second, two.from_flag(&[right.to_owned()], flag));
                    node
                };
                Data::List(items().map(pair).collect())
            }
            Self::Objects([(first, one @ Self::Int(..), _), (second, map @ Self::Map(..), _)]) => {
                let object = |item: &str| {
                    let (number, amounts) = item.split_once(':').unwrap_or((item, ""));
                    let mut node = node(Data::Map(Vec::new()));
                    node.put(first, one.from_flag(&[number.to_owned()], flag));
                    node.put(second, map.from_flag(&[amounts.to_owned()], flag));
                    node
                };
                let objects = given.iter().flat_map(|g| g.split(';')).filter(|g| !g.is_empty());
                Data::List(objects.map(object).collect())
            }
            Self::Objects(_) => Data::List(items().map(|item| taint(item, &origin)).collect()),
            Self::Text
            | Self::Path
            | Self::Checked(_)
            | Self::Word(_)
            | Self::Duration(..)
            | Self::DurationOrNanos => Data::Text(last.to_owned()),
        };
        node(data)
    }
}

/// Sets the value of a key that may contain dots.
fn set(map: &mut LocatedValue, key: &str, value: LocatedValue) {
    let origin = value.origin.clone();
    let Data::Map(entries) = &mut map.data else { return };
    match entries.iter_mut().find(|e| e.key == key) {
        Some(entry) => entry.value = value,
        None => entries.push(MapEntry { key: key.to_owned(), origin, value }),
    }
}

/// Parses a taint of the kubelet's flag: `key=value:effect` or `key:effect`.
fn taint(item: &str, origin: &Origin) -> LocatedValue {
    let (rest, effect) = item.split_once(':').unwrap_or((item, ""));
    let (key, value) = rest.split_once('=').unwrap_or((rest, ""));
    let mut node = LocatedValue { data: Data::Map(Vec::new()), origin: origin.clone() };
    for (name, text) in [("key", key), ("value", value), ("effect", effect)] {
        if !text.is_empty() {
            node.put(name, LocatedValue { data: Data::Text(text.to_owned()), origin: origin.clone() });
        }
    }
    node
}

fn check_object(fields: &[(&str, Kind, bool)], node: &LocatedValue, path: &str, out: &mut Vec<Diagnostic>) {
    let Data::Map(entries) = &node.data else {
        out.push(Diagnostic::error(node.origin.clone(), path, format!("{}: must be a map", node.data)));
        return;
    };
    for entry in entries {
        let path = format!("{path}.{}", entry.key);
        match fields.iter().find(|(name, ..)| *name == entry.key) {
            Some((_, kind, _)) => kind.check(&entry.value, &path, out),
            None => {
                let hint = crate::suggest::hint(&entry.key, fields.iter().map(|(name, ..)| *name));
                out.push(Diagnostic::warning(
                    entry.origin.clone(),
                    path,
                    format!("unknown field, ignored{hint}"),
                ));
            }
        }
    }
    for (name, ..) in fields.iter().filter(|(.., required)| *required) {
        if node.get(name).is_none_or(|n| matches!(&n.data, Data::Null) || n.text() == Some("")) {
            out.push(Diagnostic::error(node.origin.clone(), format!("{path}.{name}"), "required"));
        }
    }
}

/// Returns a number as a float, or NaN for other values.
pub(crate) fn number(value: &Data) -> f64 {
    match value {
        #[allow(clippy::cast_precision_loss, reason = "compared with small bounds only")]
        Data::Int(number) => *number as f64,
        Data::Float(number) => *number,
        _ => f64::NAN,
    }
}

/// Joins words as in `a`, `a or b` or `a, b or c`.
pub(crate) fn or_list(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [most @ .., last] => format!("{} or {last}", most.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::{address, clean_path, collector, listen, quantity, threshold, unix_endpoint};

    fn rendered(kind: &Kind, yaml: &str) -> Vec<String> {
        let mut out = Vec::new();
        kind.check(&crate::yaml::value(yaml), "f", &mut out);
        out.iter().map(Diagnostic::text).collect()
    }

    #[test]
    fn each_kind_describes_an_invalid_value() {
        const WORDS: Kind = Kind::Word(&["", "a", "b"]);
        const TAINTS: Kind = Kind::Objects(&[("key", Kind::Text, true), ("effect", WORDS, false)]);
        for (kind, yaml, want) in [
            (Kind::Bool, "yes", "f: \"yes\": must be true or false"),
            (Kind::Int(1, 3), "0", "f: 0 is below 1"),
            (Kind::Int(1, 3), "4", "f: 4 is above 3"),
            (Kind::Int(1, 3), "1.5", "f: 1.5: must be a whole number"),
            (Kind::Int(1, 3), "\"1\"", "f: \"1\": must be a whole number"),
            (Kind::Number(0.0, 1.0), "0", "f: 0: must be more than 0 and at most 1"),
            (Kind::Text, "5", "f: 5: must be text, put it in quotes"),
            (Kind::Text, "[x]", "f: a list: must be text"),
            (DURATION, "\"5\"", "f: \"5\": a duration needs a unit, e.g. 5s"),
            (DURATION, "5", "f: 5: a duration needs a unit, e.g. \"5s\""),
            (DURATION, "-1s", "f: -1s is below 0s"),
            (Kind::Duration(0, 1_000_000_000), "2s", "f: 2s is above 1s"),
            (DURATION, "true", "f: true: must be a duration, e.g. 5s"),
            (WORDS, "c", "f: \"c\": must be a or b"),
            (Kind::List(&Kind::Text), "x", "f: \"x\": must be a list, e.g. [\"x\"]"),
            (Kind::List(&Kind::Text), "[x, 1]", "f[1]: 1: must be text, put it in quotes"),
            (Kind::List(&Kind::Text), "[x, ~]", "f[1]: has no value"),
            (Kind::Map(Keys::Any, &Kind::Text), "[]", "f: a list: must be a map"),
            (
                Kind::Map(Keys::Of(&["cpu"], "unknown resource"), &Kind::Text),
                "{cpus: 1}",
                "f.cpus: unknown resource (did you mean cpu?)",
            ),
            (TAINTS, "[{effect: a}]", "f[0].key: required"),
            (TAINTS, "[{key: k, effct: a}]", "f[0].effct: unknown field, ignored (did you mean effect?)"),
            (Kind::Checked(threshold), "10%x", "f: \"10%x\" is neither a quantity nor a percentage"),
            (Kind::Checked(threshold), "101%", "f: \"101%\" is not between 0% and 100%"),
            (Kind::Checked(threshold), "\"0\"", "f: \"0\" must be positive"),
            (
                Kind::Checked(quantity),
                "1Gb",
                "f: \"1Gb\" is not a quantity, expected for example 500m, 2 or 1Gi",
            ),
            (Kind::Checked(quantity), "\"-1\"", "f: \"-1\" is negative"),
            (Kind::Checked(address), "10.96.0", "f: \"10.96.0\" is not an IP address"),
            (Kind::Checked(unix_endpoint), "tcp://x", "f: \"tcp://x\" is not unix:///absolute/path"),
            (
                Kind::Checked(clean_path),
                "/a//b",
                "f: \"/a//b\" is not a clean path: no //, no trailing /, no . or ..",
            ),
            (Kind::Checked(collector), "http://x", "f: \"http://x\" is not host:port"),
            (
                Kind::Checked(listen),
                ":9000",
                "f: \":9000\" is not an address with a port, expected for example 127.0.0.1:9101",
            ),
        ] {
            assert_eq!(rendered(&kind, yaml), [want], "{yaml}");
        }
        for (kind, yaml) in [
            (DURATION, "1m30s"),
            (DURATION, "~"),
            (Kind::DurationOrNanos, "0"),
            (Kind::Checked(threshold), "10%"),
            (Kind::Checked(threshold), "100Mi"),
            (Kind::Checked(collector), "localhost:4317"),
            (Kind::Checked(clean_path), "/var/log/pods"),
        ] {
            assert_eq!(rendered(&kind, yaml), [""; 0], "{yaml}");
        }
    }

    #[test]
    fn a_value_survives_the_round_trip_through_its_flag() {
        const TAINTS: Kind = Kind::Objects(&[
            ("key", Kind::Text, true),
            ("value", Kind::Text, false),
            ("effect", Kind::Text, true),
        ]);
        const SHARES: Kind =
            Kind::Objects(&[("priority", Kind::Int(-9, 9), true), ("seconds", Kind::Int(0, 99), true)]);
        const RESERVED: Kind = Kind::Objects(&[
            ("numaNode", Kind::Int(0, 9), true),
            ("limits", Kind::Map(Keys::Any, &Kind::Text), true),
        ]);
        for (kind, yaml, flags) in [
            (Kind::Bool, "false", vec!["false"]),
            (Kind::Int(0, 9), "7", vec!["7"]),
            (DURATION, "1m30s", vec!["1m30s"]),
            (Kind::List(&Kind::Text), "[a, b]", vec!["a", "b"]),
            (Kind::List(&Kind::Int(0, 9)), "[7, 8]", vec!["7", "8"]),
            (Kind::Map(Keys::Any, &Kind::Text), "{cpu: 100m, memory: 1Gi}", vec!["cpu=100m", "memory=1Gi"]),
            (Kind::Map(Keys::Any, &Kind::Text), "{memory.available: 1Gi}", vec!["memory.available=1Gi"]),
            (Kind::Map(Keys::Any, &Kind::Bool), "{A: true}", vec!["A=true"]),
            (Kind::Map(Keys::Any, &Kind::List(&Kind::Text)), "{X: [a, b]}", vec!["X: a", "X: b"]),
            (SHARES, "[{priority: -5, seconds: 30}, {priority: 7, seconds: 0}]", vec!["-5=30", "7=0"]),
            (TAINTS, "[{key: k, value: v, effect: NoSchedule}]", vec!["k=v:NoSchedule"]),
            (
                RESERVED,
                "[{numaNode: 0, limits: {memory: 1Gi, hugepages-2Mi: 4Mi}}, {numaNode: 1, limits: {memory: 2Gi}}]",
                vec!["0:memory=1Gi,hugepages-2Mi=4Mi", "1:memory=2Gi"],
            ),
        ] {
            let node = crate::yaml::value(yaml);
            let given = kind.to_flag(&node);
            assert_eq!(given, flags);
            assert!(
                kind.from_flag(&given, "--x").equals(&node),
                "{yaml}: {:?}",
                kind.from_flag(&given, "--x")
            );
        }
        assert!(
            Kind::List(&Kind::Text)
                .from_flag(&["a,b".into(), "c".into()], "--x")
                .equals(&crate::yaml::value("[a, b, c]"))
        );
        assert!(RESERVED.from_flag(&["0:memory=1Gi;1:memory=2Gi".into()], "--x").equals(
            &crate::yaml::value(
                "[{numaNode: 0, limits: {memory: 1Gi}}, {numaNode: 1, limits: {memory: 2Gi}}]"
            )
        ));
        assert!(
            TAINTS
                .from_flag(&["k:NoExecute".into()], "--x")
                .equals(&crate::yaml::value("[{key: k, effect: NoExecute}]"))
        );
    }

    #[test]
    fn a_zero_value_counts_as_not_set_as_in_the_kubelet() {
        for (kind, yaml) in [(DURATION, "0s"), (COUNT, "0"), (Kind::Text, "\"\""), (Kind::Text, "~")] {
            assert!(kind.is_zero(&crate::yaml::value(yaml)), "{yaml}");
        }
        assert!(!Kind::Bool.is_zero(&crate::yaml::value("false")));
        assert!(!Kind::Text.is_zero(&crate::yaml::value("0s")));
    }
}
