//! Fields of a pod that its environment and its files refer to.

use k8s_openapi::api::core::v1::ObjectFieldSelector;

use super::errors::Errors;
use super::names;

/// `validateObjectFieldSelector`
pub(super) fn field_ref(field: &ObjectFieldSelector, fields: &[&str], path: &str, errors: &mut Errors) {
    match field.api_version.as_deref() {
        None | Some("") => return errors.required(format_args!("{path}.apiVersion"), ""),
        Some("v1") => {}
        Some(version) => {
            let detail = format_args!("error converting fieldPath: unsupported pod version: {version}");
            return errors.invalid(format_args!("{path}.fieldPath"), field.field_path.as_str(), detail);
        }
    }
    let whole = field.field_path.as_str();
    let subscript = whole.split_once("['").and_then(|(name, key)| Some((name, key.strip_suffix("']")?)));
    match (whole, subscript) {
        ("", _) => errors.required(format_args!("{path}.fieldPath"), ""),
        (_, Some(("metadata.annotations", key))) => {
            errors.format(path, key, names::qualified(&key.to_lowercase()));
        }
        (_, Some(("metadata.labels", key))) => errors.format(path, key, names::qualified(key)),
        (_, Some((name, _))) => errors.invalid(path, name, "does not support subscript"),
        (whole, None) => {
            // `pkg/apis/core/pods: ConvertDownwardAPIFieldLabel`
            let name = if whole == "spec.host" { "spec.nodeName" } else { whole };
            errors.word_if_set(format_args!("{path}.fieldPath"), Some(name), fields);
        }
    }
}
