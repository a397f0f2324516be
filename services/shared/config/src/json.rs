//! The configuration as JSON, which a running process serves to clients.

use serde_json::{Value, json};

use crate::config::Config;
use crate::node::{Data, LocatedValue};
use crate::print::MASKED;
use crate::table::{Document, Row, Service};

/// Returns the fields of a document that `wanted` selects, with its version and kind. Secret values are
/// masked.
#[must_use]
pub fn document(config: &Config, document: Document, wanted: impl Fn(&Row) -> bool) -> Value {
    let mut out = json!({"apiVersion": document.api_version(), "kind": document.kind()});
    for row in document.rows().iter().filter(|row| wanted(row)) {
        if let Some(value) = config.value(document, row.field) {
            put(&mut out, row.field, value_json(value, row.secret));
        }
    }
    out
}

/// Copies the fields that `service` honours from `theirs`, the document of that service, to `out`.
pub fn take(out: &mut Value, theirs: &Value, document: Document, service: Service) {
    for row in document.rows().iter().filter(|row| row.services().contains(&service)) {
        let value = row.field.split('.').fold(theirs, |at, key| &at[key]);
        if !value.is_null() {
            put(out, row.field, value.clone());
        }
    }
}

fn put(out: &mut Value, field: &str, value: Value) {
    let mut at = out;
    for key in field.split('.') {
        // `out` was created by this module, so every parent of a field is an object.
        at = &mut at[key];
    }
    *at = value;
}

fn value_json(value: &LocatedValue, secret: bool) -> Value {
    match &value.data {
        Data::Map(entries) => entries.iter().map(|e| (e.key.clone(), value_json(&e.value, secret))).collect(),
        Data::List(elements) => elements.iter().map(|e| value_json(e, secret)).collect(),
        Data::Null => Value::Null,
        _ if secret => MASKED.into(),
        Data::Bool(yes) => (*yes).into(),
        Data::Int(number) => (*number).into(),
        Data::Float(number) => (*number).into(),
        Data::Text(text) => text.clone().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(fields: &str) -> Config {
        let file = format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{fields}");
        Config::from_bytes(file.as_bytes(), std::path::Path::new("c.yaml"), false).unwrap()
    }

    #[test]
    fn of_another_services_fields_only_the_honoured_ones_are_read() {
        let mine = config("healthzPort: 1\nmaxPods: 5\nevictionHard: {memory.available: 1Gi}\n");
        let theirs = config(
            "healthzPort: 2\nmaxPods: 7\nstaticPodPath: /manifests\nstaticPodURLHeader: {Authorization: [secret]}\n",
        );
        let honours = |row: &Row| row.services().contains(&Service::PodSync);
        let rendered = document(&theirs, Document::Kubelet, honours);
        assert!(rendered["healthzPort"].is_null() && !rendered.to_string().contains("secret"), "{rendered}");
        let mut out = document(&mine, Document::Kubelet, |_| true);
        take(&mut out, &rendered, Document::Kubelet, Service::PodSync);
        assert_eq!((&out["healthzPort"], &out["maxPods"]), (&json!(1), &json!(7)));
        assert_eq!(out["staticPodPath"], "/manifests");
        assert_eq!(out["kind"], "KubeletConfiguration");
    }
}
