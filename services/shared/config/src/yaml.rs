//! Parses YAML, and thus JSON, to [`LocatedValue`]s with line numbers. granit-parser produces events, from
//! which this module builds trees.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use granit_parser::{Event, Parser, ScalarStyle, Span, Tag};

use crate::diagnostics::Diagnostic;
use crate::node::{Data, LocatedValue, MapEntry, Origin};

/// Largest number of values in a file, with aliases expanded. A configuration has a few hundred.
const MAX_NODES: usize = 20_000;
/// Largest depth of nesting. A configuration has five levels.
const MAX_DEPTH: usize = 64;

/// Returns all documents of a text that parse, and the errors of the text. Empty documents are omitted.
#[must_use]
pub(crate) fn documents(text: &str, file: &Arc<Path>) -> (Vec<LocatedValue>, Vec<Diagnostic>) {
    let mut options =
        granit_parser::options! { flow_nesting_limit: MAX_DEPTH, block_nesting_limit: MAX_DEPTH };
    options.set_emit_comments(false);
    let mut parser = Parser::new_from_str_with_options(text, options);
    let mut builder =
        Builder { file, documents: Vec::new(), diagnostics: Vec::new(), nodes: 0, doc: Doc::default() };
    while let Some(next) = parser.next_event() {
        let step = match next {
            Ok((event, span)) => builder.event(event, span),
            Err(error) => {
                let line = error.marker().line().max(1);
                builder.diagnostic(line, &error.info().to_string());
                builder.doc = Doc::default();
                // Parsing continues after an invalid document, so that the errors of later documents are
                // reported, too.
                match parser.proceed_next_document() {
                    Ok(true) => Step::On,
                    Ok(false) | Err(_) => Step::Stop,
                }
            }
        };
        if matches!(step, Step::Stop) {
            break;
        }
    }
    (builder.documents, builder.diagnostics)
}

/// Parses a value that is a constant of this program.
pub(crate) fn value(text: &str) -> LocatedValue {
    let file: Arc<Path> = Path::new("").into();
    let (mut documents, _) = documents(text, &file);
    let mut node = documents.pop().unwrap_or(LocatedValue::default_of(Data::Null));
    forget_origins(&mut node);
    node
}

fn forget_origins(node: &mut LocatedValue) {
    node.origin = Origin::Default;
    match &mut node.data {
        Data::List(elements) => elements.iter_mut().for_each(forget_origins),
        Data::Map(entries) => {
            for entry in entries {
                entry.origin = Origin::Default;
                forget_origins(&mut entry.value);
            }
        }
        Data::Null | Data::Bool(_) | Data::Int(_) | Data::Float(_) | Data::Text(_) => {}
    }
}

enum Step {
    On,
    Stop,
}

/// A list or map that is not complete.
struct Open {
    node: LocatedValue,
    anchor: usize,
    /// The key whose value comes next, with its line. `None` in a list.
    key: Option<(String, usize)>,
    keys: HashSet<String>,
    /// Number of values in it, including itself.
    nodes: usize,
}

#[derive(Default)]
struct Doc {
    open: Vec<Open>,
    anchors: HashMap<usize, (LocatedValue, usize)>,
    root: Option<LocatedValue>,
}

struct Builder<'a> {
    file: &'a Arc<Path>,
    documents: Vec<LocatedValue>,
    diagnostics: Vec<Diagnostic>,
    nodes: usize,
    doc: Doc,
}

impl Builder<'_> {
    fn origin(&self, line: usize) -> Origin {
        Origin::File(Arc::clone(self.file), line)
    }

    fn diagnostic(&mut self, line: usize, message: &str) {
        let path = self.path();
        self.diagnostics.push(Diagnostic::error(self.origin(line), path, message.to_owned()));
    }

    /// Returns the keys of all incomplete maps, joined to a path.
    fn path(&self) -> String {
        let keys = self.doc.open.iter().filter_map(|o| o.key.as_ref().map(|(key, _)| key.as_str()));
        keys.collect::<Vec<_>>().join(".")
    }

    fn event(&mut self, event: Event<'_>, span: Span) -> Step {
        let line = span.start.line().max(1);
        match event {
            Event::DocumentStart(..) => self.doc = Doc::default(),
            Event::DocumentEnd => {
                let root = std::mem::take(&mut self.doc).root;
                self.documents.extend(root.filter(|r| r.data != Data::Null));
            }
            Event::Scalar(text, style, anchor, tag) => {
                if self.wants_key() {
                    return self.key(text.into_owned(), line, style, tag.as_deref());
                }
                let data = match scalar(&text, style, tag.as_deref()) {
                    Ok(data) => data,
                    Err(why) => {
                        self.diagnostic(line, &why);
                        Data::Null
                    }
                };
                return self.complete(LocatedValue { data, origin: self.origin(line) }, anchor, 1, 1);
            }
            Event::SequenceStart(_, anchor, tag) => {
                return self.open(Data::List(Vec::new()), anchor, tag, line);
            }
            Event::MappingStart(_, anchor, tag) => {
                return self.open(Data::Map(Vec::new()), anchor, tag, line);
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(open) = self.doc.open.pop() {
                    return self.complete(open.node, open.anchor, open.nodes, 1);
                }
            }
            Event::Alias(id) => {
                if self.wants_key() {
                    self.diagnostic(line, "an alias cannot be a key");
                    return Step::Stop;
                }
                let Some((node, nodes)) = self.doc.anchors.get(&id).cloned() else {
                    self.diagnostic(line, "an alias must not refer to a value that contains it");
                    return Step::Stop;
                };
                return self.complete(node, 0, nodes, nodes);
            }
            _ => {}
        }
        Step::On
    }

    fn wants_key(&self) -> bool {
        self.doc.open.last().is_some_and(|o| matches!(o.node.data, Data::Map(_)) && o.key.is_none())
    }

    fn key(&mut self, key: String, line: usize, style: ScalarStyle, tag: Option<&Tag>) -> Step {
        if key == "<<" && style == ScalarStyle::Plain {
            self.diagnostic(line, "<<: merge keys are not supported, write the fields out");
        } else if !matches!(scalar(&key, style, tag), Ok(Data::Text(_))) {
            self.diagnostic(line, &format!("{key}: a key must be text, put it in quotes"));
        }
        if let Some(open) = self.doc.open.last_mut() {
            let fresh = open.keys.insert(key.clone());
            let first = open.node.entries().iter().find(|e| e.key == key).map(|e| e.origin.clone());
            open.key = Some((key, line));
            if !fresh {
                let first = match first {
                    Some(Origin::File(_, line)) => format!(" (first in line {line})"),
                    _ => String::new(),
                };
                self.diagnostic(line, &format!("duplicate key{first}"));
            }
        }
        Step::On
    }

    fn open(&mut self, data: Data, anchor: usize, tag: Option<Cow<'_, Tag>>, line: usize) -> Step {
        if self.wants_key() {
            self.diagnostic(line, "a key must be text, not a list or map");
            return Step::Stop;
        }
        let core = matches!(&data, Data::List(_) if tag.as_deref().is_none_or(|t| t.is_yaml_core_schema_tag("seq")))
            || matches!(&data, Data::Map(_) if tag.as_deref().is_none_or(|t| t.is_yaml_core_schema_tag("map")));
        if !core {
            self.diagnostic(line, "tags are not supported");
        }
        let node = LocatedValue { data, origin: self.origin(line) };
        self.doc.open.push(Open { node, anchor, key: None, keys: HashSet::new(), nodes: 1 });
        Step::On
    }

    /// Adds a complete value to its parent.
    ///
    /// `nodes` is the number of values that it contains, `fresh` the number of those that were not counted
    /// before.
    fn complete(&mut self, node: LocatedValue, anchor: usize, nodes: usize, fresh: usize) -> Step {
        self.nodes = self.nodes.saturating_add(fresh);
        if self.nodes > MAX_NODES {
            let line = match &node.origin {
                Origin::File(_, line) => *line,
                _ => 1,
            };
            self.diagnostic(line, &format!("more than {MAX_NODES} values in one file"));
            return Step::Stop;
        }
        if anchor > 0 {
            self.doc.anchors.insert(anchor, (node.clone(), nodes));
        }
        let Some(open) = self.doc.open.last_mut() else {
            self.doc.root = Some(node);
            return Step::On;
        };
        open.nodes = open.nodes.saturating_add(nodes);
        match &mut open.node.data {
            Data::Map(entries) => {
                if let Some((key, line)) = open.key.take() {
                    let origin = Origin::File(Arc::clone(self.file), line);
                    // A duplicate key keeps its first value. It was reported as an error, so the file is not
                    // used.
                    if open.keys.len() > entries.len() {
                        entries.push(MapEntry { key, origin, value: node });
                    }
                }
            }
            Data::List(elements) => elements.push(node),
            Data::Null | Data::Bool(_) | Data::Int(_) | Data::Float(_) | Data::Text(_) => {}
        }
        Step::On
    }
}

/// Parses a scalar by YAML's core schema. Words such as `yes` and `on` are text.
fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Result<Data, String> {
    match tag {
        Some(tag) if tag.is_yaml_core_schema_tag("str") => return Ok(Data::Text(text.to_owned())),
        Some(tag) if !tag.is_yaml_core_schema() => return Err("tags are not supported".to_owned()),
        Some(_) | None => {}
    }
    if style != ScalarStyle::Plain && tag.is_none() {
        return Ok(Data::Text(text.to_owned()));
    }
    Ok(plain(text))
}

/// Parses an unquoted scalar.
pub(crate) fn plain(text: &str) -> Data {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Data::Null,
        "true" | "True" | "TRUE" => return Data::Bool(true),
        "false" | "False" | "FALSE" => return Data::Bool(false),
        _ => {}
    }
    let (sign, digits) = match text.as_bytes()[0] {
        b'-' => ("-", &text[1..]),
        b'+' => ("", &text[1..]),
        _ => ("", text),
    };
    let radix = match digits.get(..2) {
        Some("0x") => 16,
        Some("0o") => 8,
        _ => 10,
    };
    let bare = if radix == 10 { digits } else { &digits[2..] };
    if bare.starts_with(|c: char| c.is_ascii_hexdigit())
        && let Ok(number) = i64::from_str_radix(&format!("{sign}{bare}"), radix)
    {
        return Data::Int(number);
    }
    // Rust's parser also accepts words such as `inf` and `nan`, which are text in a configuration.
    if digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && let Ok(number) = text.parse::<f64>()
        && number.is_finite()
    {
        return Data::Float(number);
    }
    Data::Text(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Vec<LocatedValue>, Vec<String>) {
        let file: Arc<Path> = Path::new("f").into();
        let (documents, diagnostics) = documents(text, &file);
        let line = |m: &Diagnostic| match &m.origin {
            Origin::File(_, line) => format!("{line} {}: {}", m.path, m.message),
            other => panic!("{other:?}"),
        };
        (documents, diagnostics.iter().map(line).collect())
    }

    #[test]
    fn plain_scalars_have_the_type_of_the_core_schema() {
        for (text, want) in [
            ("~", Data::Null),
            ("true", Data::Bool(true)),
            ("yes", Data::Text("yes".into())),
            ("12", Data::Int(12)),
            ("-3", Data::Int(-3)),
            ("+4", Data::Int(4)),
            ("0x1F", Data::Int(31)),
            ("0o17", Data::Int(15)),
            ("1.5", Data::Float(1.5)),
            ("1e3", Data::Float(1000.0)),
            ("99999999999999999999", Data::Float(1e20)),
            ("10%", Data::Text("10%".into())),
            ("5s", Data::Text("5s".into())),
            ("nan", Data::Text("nan".into())),
            ("-", Data::Text("-".into())),
            ("0x", Data::Text("0x".into())),
            ("--1", Data::Text("--1".into())),
        ] {
            assert_eq!(plain(text), want, "{text}");
        }
        assert_eq!(value("{a: \"5\"}").at("a").map(|n| n.data.clone()), Some(Data::Text("5".into())));
    }

    #[test]
    fn every_value_has_its_line_in_yaml_and_json() {
        for text in ["a: 1\nb:\n  c:\n  - x\n  - y\n", "{\"a\": 1,\n\"b\":\n{\"c\":\n[\"x\",\n\"y\"]}}"] {
            let (documents, diagnostics) = read(text);
            assert_eq!(diagnostics, [""; 0], "{text}");
            let y = &documents[0].at("b.c").unwrap().elements()[1];
            assert_eq!(y.origin, Origin::File(Path::new("f").into(), 5), "{text}");
        }
    }

    #[test]
    fn an_error_in_a_text_is_reported_with_its_line() {
        for (text, want) in [
            ("a: 1\na: 2\n", vec!["2 a: duplicate key (first in line 1)"]),
            (
                "a:\n  b: 1\n  b: 2\nc: 1\nc: 1\n",
                vec!["3 a.b: duplicate key (first in line 2)", "5 c: duplicate key (first in line 4)"],
            ),
            ("a: !thing 1\n", vec!["1 a: tags are not supported"]),
            (
                "a: &x {b: 1}\nc:\n  <<: *x\n",
                vec!["3 c: <<: merge keys are not supported, write the fields out"],
            ),
            ("1: x\n", vec!["1 : 1: a key must be text, put it in quotes"]),
            ("a: &x\n  b: *x\n", vec!["2 a.b: an alias must not refer to a value that contains it"]),
            ("[a]: b\n", vec!["1 : a key must be text, not a list or map"]),
        ] {
            assert_eq!(read(text).1, want, "{text}");
        }
    }

    #[test]
    fn a_broken_document_does_not_hide_the_next_one() {
        let (documents, diagnostics) = read("a: [1\n---\nb: 1\nb: 2\n");
        assert_eq!(diagnostics.len(), 2, "{diagnostics:?}");
        assert_eq!(diagnostics[1], "4 b: duplicate key (first in line 3)");
        assert_eq!(documents.len(), 1);
    }

    #[test]
    fn aliases_that_expand_without_limit_and_deep_nesting_are_rejected() {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for n in 1..10 {
            let last = format!("*a{}, ", n - 1).repeat(10);
            text.push_str(&format!("a{n}: &a{n} [{last}]\n"));
        }
        let (_, diagnostics) = read(&text);
        assert!(diagnostics[0].ends_with("more than 20000 values in one file"), "{diagnostics:?}");
        assert!(!read(&"[".repeat(5000)).1.is_empty());
        assert!(!read(&"- ".repeat(5000)).1.is_empty());
    }

    #[test]
    fn an_alias_stands_for_its_value_in_the_same_document() {
        let (documents, diagnostics) = read("a: &x [1, 2]\nb: *x\n");
        assert_eq!(diagnostics, [""; 0]);
        assert!(documents[0].at("b").unwrap().equals(&value("[1, 2]")));
        assert_eq!(read("a: &x 1\n---\nb: *x\n").1.len(), 1);
    }
}
