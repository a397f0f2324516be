//! Writes a pod as `github.com/davecgh/go-spew` does for a hash (`k8s.io/utils/dump: ForHash`).
//!
//! The form is that of `%#v` with sorted keys, without methods, addresses and capacities:
//!
//! - A value follows its type in parentheses. Elements of a list, keys and values of a map have no type.
//! - A struct is `{Name:value Name:value}`, a list `[a b]`, a map `map[k:v k:v]`, in each case separated by
//!   spaces.
//! - A pointer is the type with `*` and the value. Absent pointers, lists and maps are `<nil>`.
//! - A text is written as it is, without quotes.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::layout::{KubeletVersion, Structure};
use super::quantity::{GoQuantity, NoQuantity};
use super::types::find;

/// The text of an absent pointer, list or map.
const NIL: &str = "<nil>";

/// Writes the dump of an internal pod: its JSON, in the shape that [`super::internal`] makes. `out` returns
/// no error.
pub(super) fn dump(pod: &Map<String, Value>, version: KubeletVersion, out: &mut dyn Write) {
    let mut dumper = Dumper { out, version };
    dumper.text("(*core.Pod)");
    if let Some(structure) = find("core.Pod", version) {
        dumper.structure(structure, pod);
    }
}

struct Dumper<'a> {
    out: &'a mut dyn Write,
    version: KubeletVersion,
}

impl Dumper<'_> {
    fn text(&mut self, text: &str) {
        let _ = self.out.write_str(text);
    }

    fn structure(&mut self, structure: &Structure, object: &Map<String, Value>) {
        self.text("{");
        for (index, field) in structure.fields(self.version).enumerate() {
            if index > 0 {
                self.text(" ");
            }
            let _ = write!(self.out, "{}:({})", field.name, field.go_type);
            let embedded = if field.key.is_empty() { find(field.go_type, self.version) } else { None };
            match embedded {
                Some(embedded) => self.structure(embedded, object),
                None => self.value(field.go_type, object.get(field.key)),
            }
        }
        self.text("}");
    }

    /// Writes a value without its type.
    fn value(&mut self, go_type: &str, value: Option<&Value>) {
        let value = value.filter(|value| !value.is_null());
        if let Some(pointed) = go_type.strip_prefix('*') {
            return if value.is_some() { self.value(pointed, value) } else { self.text(NIL) };
        }
        if let Some(element) = go_type.strip_prefix("[]") {
            return self.list(element, value.and_then(Value::as_array));
        }
        if let Some((_, element)) = go_type.strip_prefix("map[").and_then(|rest| rest.split_once(']')) {
            return self
                .map(value.and_then(Value::as_object), |dumper, value| dumper.value(element, Some(value)));
        }
        match go_type {
            "core.ResourceList" => self.map(value.and_then(Value::as_object), Self::resource),
            "resource.Quantity" => self.quantity(value, Ok),
            "intstr.IntOrString" => self.int_or_string(value),
            "v1.Time" => self.time(value),
            _ => match find(go_type, self.version) {
                Some(structure) => {
                    let empty = Map::new();
                    self.structure(structure, value.and_then(Value::as_object).unwrap_or(&empty));
                }
                None => self.scalar(go_type, value),
            },
        }
    }

    fn list(&mut self, element: &str, values: Option<&Vec<Value>>) {
        let Some(values) = values else { return self.text(NIL) };
        self.text("[");
        for (index, value) in values.iter().enumerate() {
            if index > 0 {
                self.text(" ");
            }
            self.value(element, Some(value));
        }
        self.text("]");
    }

    fn map(&mut self, values: Option<&Map<String, Value>>, write: impl Fn(&mut Self, &Value)) {
        let Some(values) = values else { return self.text(NIL) };
        let mut sorted: Vec<_> = values.iter().collect();
        sorted.sort_unstable_by_key(|(key, _)| key.as_bytes());
        self.text("map[");
        for (index, (key, value)) in sorted.into_iter().enumerate() {
            if index > 0 {
                self.text(" ");
            }
            self.text(key);
            self.text(":");
            write(self, value);
        }
        self.text("]");
    }

    fn resource(&mut self, value: &Value) {
        self.quantity(Some(value), GoQuantity::rounded);
    }

    /// Writes a text, or the sum of a list of texts.
    fn quantity(
        &mut self,
        value: Option<&Value>,
        change: impl Fn(GoQuantity) -> Result<GoQuantity, NoQuantity>,
    ) {
        let quantity = match value {
            None => Ok(GoQuantity::zero()),
            Some(Value::Array(texts)) => GoQuantity::sum(texts.iter().filter_map(Value::as_str)),
            Some(text) => GoQuantity::parse(text.as_str().unwrap_or_default()),
        };
        match quantity.and_then(change) {
            Ok(quantity) => quantity.dump(self.out),
            // A kubelet rejects the manifest, or has a number that no node has.
            Err(NoQuantity) => {
                let _ = write!(self.out, "{}", value.unwrap_or(&Value::Null));
            }
        }
    }

    fn int_or_string(&mut self, value: Option<&Value>) {
        let (kind, number, text) = match value {
            Some(Value::String(text)) => (1, 0, text.as_str()),
            other => (0, other.and_then(Value::as_i64).unwrap_or_default(), ""),
        };
        let _ = write!(self.out, "{{Type:(intstr.Type){kind} IntVal:(int32){number} StrVal:(string){text}}}");
    }

    fn time(&mut self, value: Option<&Value>) {
        // A kubelet shows the time zone of its process for another time than the zero one.
        let text = value
            .and_then(Value::as_str)
            .unwrap_or("{wall:(uint64)0 ext:(int64)0 loc:(*time.Location)<nil>}");
        let _ = write!(self.out, "{{Time:(time.Time){text}}}");
    }

    fn scalar(&mut self, go_type: &str, value: Option<&Value>) {
        let _ = match (value, go_type) {
            (Some(Value::String(text)), _) => self.out.write_str(text),
            (Some(other), _) => write!(self.out, "{other}"),
            (None, "bool") => self.out.write_str("false"),
            (None, "int32" | "int64") => self.out.write_str("0"),
            // Other types without a struct are texts.
            (None, _) => Ok(()),
        };
    }
}
