//! Objects of the API server that may not be decodable.
//!
//! A list and a watch fail as a whole if one object cannot be decoded, so a user with write access to one
//! object could end the watch of all others. [`Lenient`] confines the failure to the object. kube's
//! `DeserializeGuard` does not: it needs decodable metadata.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// An object, or the error that prevents its decoding.
///
/// `metadata.managedFields` are removed. An object that can be decoded without its status is decoded without
/// it.
#[derive(Debug, Clone)]
pub(crate) struct Lenient<K>(Result<K, Undecodable>);

/// An object that cannot be decoded.
#[derive(Debug, Clone, PartialEq)]
pub struct Undecodable {
    /// Namespace, name, UID and resource version.
    pub metadata: Box<ObjectMeta>,
    /// Path of the field that cannot be decoded.
    pub field: String,
    /// The error of that field.
    pub error: String,
}

impl<K> Lenient<K> {
    /// Returns the object.
    ///
    /// # Errors
    /// Fails if it cannot be decoded.
    pub(crate) fn into_result(self) -> Result<K, Undecodable> {
        self.0
    }
}

impl<'de, K: DeserializeOwned + Resource> Deserialize<'de> for Lenient<K> {
    /// Decodes the text of the object. The deserializer must be that of a text or of a value, and not of
    /// buffered content, as in an untagged enum.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        if let Ok(mut decoded) = serde_json::from_str::<K>(text.get()) {
            decoded.meta_mut().managed_fields = None;
            return Ok(Self(Ok(decoded)));
        }
        let mut object: Value = serde_json::from_str(text.get()).map_err(D::Error::custom)?;
        remove(&mut object["metadata"], "managedFields");
        if let Ok(decoded) = K::deserialize(&object) {
            return Ok(Self(Ok(decoded)));
        }
        remove(&mut object, "status");
        // The path costs about as much as the decoding, and only an error needs it.
        let decoded = serde_path_to_error::deserialize(&object);
        Ok(Self(decoded.map_err(|e| Undecodable {
            metadata: Box::new(identity(&object["metadata"])),
            field: e.path().to_string(),
            error: e.inner().to_string(),
        })))
    }
}

fn remove(object: &mut Value, field: &str) {
    if let Some(fields) = object.as_object_mut() {
        fields.remove(field);
    }
}

fn identity(metadata: &Value) -> ObjectMeta {
    let text = |field: &str| metadata[field].as_str().map(str::to_owned);
    ObjectMeta {
        namespace: text("namespace"),
        name: text("name"),
        uid: text("uid"),
        resource_version: text("resourceVersion"),
        ..ObjectMeta::default()
    }
}

impl<K: Resource> Resource for Lenient<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic_type: &Self::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic_type)
    }

    fn group(dynamic_type: &Self::DynamicType) -> Cow<'_, str> {
        K::group(dynamic_type)
    }

    fn version(dynamic_type: &Self::DynamicType) -> Cow<'_, str> {
        K::version(dynamic_type)
    }

    fn plural(dynamic_type: &Self::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic_type)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.as_ref().map_or_else(|undecodable| &undecodable.metadata, K::meta)
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.as_mut().map_or_else(|undecodable| &mut undecodable.metadata, K::meta_mut)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;

    /// The API server accepts this time, and jiff cannot represent it.
    const LAST: &str = "9999-12-31T23:59:59Z";

    fn pod(change: impl FnOnce(&mut Value)) -> Result<Pod, Undecodable> {
        let mut pod = json!({
            "metadata": {"namespace": "default", "name": "web", "uid": "u1", "resourceVersion": "7"},
            "spec": {"containers": [{"name": "main"}]},
            "status": {"phase": "Running"},
        });
        change(&mut pod);
        serde_json::from_value::<Lenient<Pod>>(pod).expect("an object never fails its list").into_result()
    }

    #[test]
    fn events_and_lists_are_decoded_from_their_text() {
        let event = |object: &str| format!(r#"{{"type":"ADDED","object":{object}}}"#);
        let named = |event: &str| {
            let event: kube::core::WatchEvent<Lenient<Pod>> = serde_json::from_str(event).unwrap();
            let kube::core::WatchEvent::Added(pod) = event else { panic!("{event:?}") };
            pod.into_result().map(|pod| pod.metadata.name)
        };
        assert_eq!(named(&event(r#"{"metadata":{"name":"a"}}"#)), Ok(Some("a".to_owned())));
        assert!(named(&event(r#"{"metadata":1}"#)).is_err());
        let list = r#"{"kind":"PodList","apiVersion":"v1","items":[{"metadata":{"name":"a"}},{"metadata":1}],"metadata":{}}"#;
        let list: kube::core::ObjectList<Lenient<Pod>> = serde_json::from_str(list).unwrap();
        let names: Vec<_> = list
            .items
            .into_iter()
            .map(|pod| pod.into_result().ok().and_then(|pod| pod.metadata.name))
            .collect();
        assert_eq!(names, [Some("a".to_owned()), None]);
    }

    #[test]
    fn managed_fields_are_removed_and_the_rest_is_kept() {
        let entry = json!([{"manager": "x", "operation": "Update", "time": LAST}]);
        for fields in [json!([]), entry, json!("none")] {
            let got = pod(|p| p["metadata"]["managedFields"] = fields.clone()).unwrap();
            assert_eq!(got.metadata.managed_fields, None, "{fields}");
            assert_eq!(got.status.unwrap().phase.as_deref(), Some("Running"), "{fields}");
        }
    }

    #[test]
    fn a_pod_whose_status_cannot_be_decoded_is_decoded_without_it() {
        let got = pod(|p| p["status"]["startTime"] = json!(LAST)).unwrap();
        assert_eq!((got.metadata.name.as_deref(), got.status), (Some("web"), None));
        assert_eq!(got.spec.unwrap().containers.len(), 1);
    }

    #[test]
    fn an_object_that_cannot_be_decoded_has_its_identity_the_field_and_the_error() {
        let all: Result<Vec<Lenient<Pod>>, _> = serde_json::from_value(json!([
            {"metadata": {"name": "a"}, "spec": {"containers": []}},
            {"metadata": {"name": "b", "uid": 1}, "spec": {"containers": [{"name": 3}]}},
            {"metadata": {"name": "c"}},
            {"metadata": 1},
        ]));
        let all: Vec<_> = all.unwrap().into_iter().map(Lenient::into_result).collect();
        let named = |got: &Result<Pod, Undecodable>| match got {
            Ok(pod) => (pod.metadata.name.clone(), String::new()),
            Err(bad) => (bad.metadata.name.clone(), bad.field.clone()),
        };
        let text = |t: &str| Some(t.to_owned());
        let got: Vec<_> = all.iter().map(named).collect();
        assert_eq!(
            got,
            [
                (text("a"), String::new()),
                (text("b"), "metadata.uid".to_owned()),
                (text("c"), String::new()),
                (None, "metadata".to_owned()),
            ]
        );
        let bad = pod(|p| p["spec"]["activeDeadlineSeconds"] = json!("long")).unwrap_err();
        assert_eq!(bad.field, "spec.activeDeadlineSeconds");
        assert!(bad.error.contains("long"), "{}", bad.error);
        let meta = &bad.metadata;
        let identity = [&meta.namespace, &meta.name, &meta.uid, &meta.resource_version];
        assert_eq!(identity.map(|i| i.as_deref()), ["default", "web", "u1", "7"].map(Some));
    }
}
