//! Reads and writes specs and fixtures.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::runtime::NODE;

/// A pod to be recorded, with the objects that it refers to.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Name of the spec and of the pod.
    pub name: String,
    /// The pod; bound to the node unless it is static.
    pub pod: Value,
    /// Objects that are created before the pod.
    pub objects: Vec<Value>,
    /// Event after the start of the pod.
    pub then: Option<Then>,
}

/// An event after the start of a pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Then {
    /// The process of this container exits.
    Exit(String),
    /// This container is restarted for a reason of its own.
    Restarted(String),
    /// The pod is patched.
    #[serde(untagged)]
    Patch {
        /// Subresource of the patch.
        subresource: String,
        /// The patch; in a fixture, the resulting spec.
        patch: Value,
    },
}

/// Recorded requests of a kubelet for a pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fixture {
    /// Version that the kubelet reports.
    pub kubelet: String,
    /// Objects that were created before the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<Value>,
    /// The pod as returned by the API server, or as in its manifest.
    pub pod: Value,
    /// Event after the start of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub then: Option<Then>,
    /// The requests; see [`crate::facts`].
    pub facts: Value,
}

/// Returns the directory of specs.
#[must_use]
pub fn specs_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("specs")
}

/// Returns the directory of fixtures.
#[must_use]
pub fn fixtures_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Returns whether the pod is static, from a manifest.
#[must_use]
pub fn is_static(name: &str) -> bool {
    name.starts_with("static-")
}

/// Returns the names of the files in `dir` with this extension.
pub(crate) fn names(dir: &Path, extension: &str) -> std::io::Result<Vec<String>> {
    let mut out: Vec<String> = std::fs::read_dir(dir)?
        .filter_map(Result::ok)
        .filter_map(|e| Some(e.file_name().to_str()?.strip_suffix(extension)?.to_owned()))
        .collect();
    out.sort();
    Ok(out)
}

/// Returns all specs, by name.
///
/// # Errors
/// Fails if a spec cannot be read or has no pod.
pub fn specs() -> anyhow::Result<Vec<Spec>> {
    names(&specs_dir(), ".yaml")?.into_iter().map(|name| spec(&name)).collect()
}

fn spec(name: &str) -> anyhow::Result<Spec> {
    let text = std::fs::read_to_string(specs_dir().join(format!("{name}.yaml")))?;
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(&text, options)
        .map_err(|e| anyhow::anyhow!("{name}: {e}"))?;
    let (pods, others): (Vec<Value>, Vec<Value>) = documents.into_iter().partition(|d| d["kind"] == "Pod");
    let (thens, objects): (Vec<Value>, Vec<Value>) = others.into_iter().partition(|d| d["kind"] == "Then");
    let then = thens.into_iter().next().map(|mut then| {
        then.as_object_mut().map(|t| t.remove("kind"));
        serde_json::from_value(then)
    });
    let [mut pod] =
        <[Value; 1]>::try_from(pods).map_err(|pods| anyhow::anyhow!("{name}: {} pods", pods.len()))?;
    pod["apiVersion"] = json!("v1");
    pod["metadata"]["name"] = json!(name);
    pod["metadata"]["namespace"] = json!("default");
    if !is_static(name) {
        pod["spec"]["nodeName"] = json!(NODE);
    }
    Ok(Spec { name: name.to_owned(), pod, objects, then: then.transpose()? })
}

/// Returns all fixtures, by name.
///
/// # Errors
/// Fails if a fixture cannot be read.
pub fn fixtures() -> anyhow::Result<Vec<(String, Fixture)>> {
    names(&fixtures_dir(), ".json")?
        .into_iter()
        .map(|name| {
            let text = std::fs::read_to_string(fixtures_dir().join(format!("{name}.json")))?;
            let fixture = serde_json::from_str(&text).map_err(|e| anyhow::anyhow!("{name}: {e}"))?;
            Ok((name, fixture))
        })
        .collect()
}

/// Writes a fixture.
///
/// # Errors
/// Fails if it cannot be written.
pub fn write(name: &str, fixture: &Fixture) -> anyhow::Result<()> {
    // The name of the token's volume ends in five random characters.
    let volume = regex::Regex::new("kube-api-access-[a-z0-9]{5}")?;
    let text = serde_json::to_string_pretty(fixture)? + "\n";
    let text = volume.replace_all(&text, "kube-api-access-12345").into_owned();
    Ok(std::fs::write(fixtures_dir().join(format!("{name}.json")), text)?)
}

/// Removes fields that the server adds to every object and that differ between runs.
pub fn strip(object: &mut Value) {
    if let Some(map) = object.as_object_mut() {
        map.remove("status");
    }
    if let Some(meta) = object["metadata"].as_object_mut() {
        meta.retain(|key, _| {
            !["uid", "resourceVersion", "creationTimestamp", "managedFields", "generation"]
                .contains(&key.as_str())
        });
    }
}
