//! Redacts the content of a debug bundle. No I/O.
//!
//! - Of an object, only the fields named here are copied.
//! - From texts, these values are removed: values of Secrets of any length, longer values that a user wrote
//!   into a pod, and everything in the format of a credential.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::collections::BTreeSet;
use std::fmt;

use regex::Regex;
use serde_json::{Map, Value, json};

/// Replaces a removed value.
const REDACTED: &str = "[redacted]";

/// Length in bytes below which a value is removed only as a whole word, and only if it comes from a Secret.
/// Removing short values inside words would make every text unreadable, and values such as `1` or `true`
/// elsewhere in a pod are not secret.
const SHORT: usize = 6;

/// Values to remove.
#[derive(Default)]
pub struct Values {
    /// Values of Secrets.
    pub secrets: BTreeSet<String>,
    /// Values that users wrote into pods: environment, arguments, annotations.
    pub suspects: BTreeSet<String>,
}

impl fmt::Debug for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Values").finish_non_exhaustive()
    }
}

/// Removes known values and the formats of credentials from texts.
pub struct Scrubber {
    /// Longest first: removing a shorter value first would leave parts of a longer one that contains it.
    values: Vec<String>,
    /// Short values of Secrets.
    words: Vec<String>,
    /// Formats of credentials and their replacements.
    formats: Vec<(Regex, String)>,
}

impl fmt::Debug for Scrubber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrubber").finish_non_exhaustive()
    }
}

impl Scrubber {
    /// Returns a scrubber of these values, and of everything in the format of a credential.
    #[must_use]
    pub fn new(values: Values) -> Self {
        let Values { secrets, suspects } = values;
        let (words, secrets): (Vec<String>, Vec<String>) =
            secrets.into_iter().filter(|v| !v.is_empty()).partition(|v| v.len() < SHORT);
        let suspects = suspects.into_iter().filter(|v| v.len() >= SHORT);
        let values: BTreeSet<String> = secrets.into_iter().chain(suspects).collect();
        let mut values: Vec<String> = values.into_iter().collect();
        values.sort_by_key(|v| std::cmp::Reverse(v.len()));
        let formats = [
            // PEM of a private key, on one or several lines.
            (
                r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\z)",
                REDACTED.to_owned(),
            ),
            // JSON web tokens.
            (r"eyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*", REDACTED.to_owned()),
            (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}", format!("$1 {REDACTED}")),
            // Bootstrap tokens.
            (r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b", REDACTED.to_owned()),
            // Credentials in a URL.
            (r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s:@]+:[^/\s@]+@", format!("$1{REDACTED}@")),
            (
                r#"(?i)\b([a-z0-9_-]*(?:password|passwd|secret|token|api[_-]?key|client-key-data|client-certificate-data)["']?\s*[:=]\s*["']?)[^\s"',;&}]+"#,
                format!("${{1}}{REDACTED}"),
            ),
        ];
        let formats =
            formats.into_iter().filter_map(|(format, with)| Some((Regex::new(format).ok()?, with))).collect();
        Self { values, words, formats }
    }

    /// Returns a text without the values.
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        let mut out = text.to_owned();
        for value in &self.values {
            out = out.replace(value.as_str(), REDACTED);
            // The value with the escapes of JSON.
            let quoted = Value::from(value.as_str()).to_string();
            out = out.replace(quoted.trim_matches('"'), REDACTED);
        }
        for word in &self.words {
            out = without_word(&out, word);
        }
        for (format, with) in &self.formats {
            out = format.replace_all(&out, with.as_str()).into_owned();
        }
        out
    }
}

/// Removes `word` where it is a whole word.
fn without_word(text: &str, word: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, found) = rest.split_at(at);
        let after = &found[word.len()..];
        // REDACTED, which may precede, ends in a bracket and so does not extend a word.
        let begins =
            before.chars().next_back().or_else(|| out.chars().next_back()).is_none_or(|c| !is_part(c));
        let ends = after.chars().next().is_none_or(|c| !is_part(c));
        let inner = |c: Option<char>| c.is_some_and(|c| !is_part(c));
        // A value that begins or ends with punctuation needs no delimiter there.
        let begins = begins || inner(word.chars().next());
        let ends = ends || inner(word.chars().next_back());
        out.push_str(before);
        out.push_str(if begins && ends { REDACTED } else { word });
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The variables of a container whose values come from Secrets.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FromSecrets {
    /// Variables with `secretKeyRef`.
    names: BTreeSet<String>,
    /// Prefixes of `envFrom` entries with `secretRef`.
    prefixes: Vec<String>,
    /// Variables of `env` from other sources. They override variables of `envFrom`.
    own: BTreeSet<String>,
}

impl FromSecrets {
    /// Returns the variables of the container `name` of a pod.
    #[must_use]
    pub fn of(pod: &Value, name: &str) -> Self {
        let lists = ["containers", "initContainers", "ephemeralContainers"];
        let containers = lists.iter().filter_map(|list| pod.pointer(&format!("/spec/{list}"))?.as_array());
        let mut out = Self::default();
        for container in containers.flatten().filter(|c| c.get("name").and_then(Value::as_str) == Some(name))
        {
            for entry in container.get("env").and_then(Value::as_array).into_iter().flatten() {
                let Some(variable) = entry.get("name").and_then(Value::as_str) else { continue };
                if entry.pointer("/valueFrom/secretKeyRef").is_some() {
                    out.names.insert(variable.to_owned());
                } else {
                    out.own.insert(variable.to_owned());
                }
            }
            for source in container.get("envFrom").and_then(Value::as_array).into_iter().flatten() {
                if source.get("secretRef").is_some() {
                    let prefix = source.get("prefix").and_then(Value::as_str).unwrap_or_default();
                    out.prefixes.push(prefix.to_owned());
                }
            }
        }
        out
    }

    /// Returns whether no variable comes from a Secret.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.prefixes.is_empty()
    }

    /// Adds the values of these variables in an environment of `NAME=value` to `out`. With `envFrom`, every
    /// variable that may come from the Secret counts.
    pub fn values<'a>(&self, environment: impl IntoIterator<Item = &'a str>, out: &mut BTreeSet<String>) {
        for (name, value) in environment.into_iter().filter_map(|entry| entry.split_once('=')) {
            let by_prefix = || {
                !self.own.contains(name)
                    && !of_image_or_cluster(name)
                    && self.prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()))
            };
            if self.names.contains(name) || by_prefix() {
                out.insert(value.to_owned());
                // Logs contain a value of several lines line by line.
                out.extend(value.lines().map(str::to_owned));
            }
        }
    }
}

/// Returns whether a variable is one that images or the cluster set in every container. With an empty prefix,
/// it would otherwise count as a variable of a Secret.
fn of_image_or_cluster(name: &str) -> bool {
    matches!(name, "PATH" | "HOME" | "HOSTNAME" | "TERM" | "LANG")
        || ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT"].iter().any(|end| name.ends_with(end))
        || name.contains("_PORT_")
        || name.contains("_SERVICE_PORT_")
}

/// Adds the values of an object that may be secret to `out`: environment, arguments, annotations, headers.
pub fn suspects(object: &Value, out: &mut BTreeSet<String>) {
    match object {
        Value::Object(map) => {
            for (key, value) in map {
                match key.as_str() {
                    "env" | "httpHeaders" => values_of(value, out),
                    "args" | "command" | "annotations" => strings(value, out),
                    _ => suspects(value, out),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|v| suspects(v, out)),
        _ => {}
    }
}

fn values_of(list: &Value, out: &mut BTreeSet<String>) {
    for entry in list.as_array().into_iter().flatten() {
        if let Some(value) = entry.get("value").and_then(Value::as_str) {
            out.insert(value.to_owned());
        }
    }
}

fn strings(value: &Value, out: &mut BTreeSet<String>) {
    match value {
        Value::String(text) => {
            out.insert(text.clone());
            // Of `--password=x`, the value alone may be in a text too.
            out.extend(text.split_once('=').map(|(_, v)| v.to_owned()));
        }
        Value::Array(list) => list.iter().for_each(|v| strings(v, out)),
        Value::Object(map) => map.values().for_each(|v| strings(v, out)),
        _ => {}
    }
}

fn pick(object: &Value, keys: &[&str]) -> Map<String, Value> {
    keys.iter().filter_map(|k| Some(((*k).to_owned(), object.get(*k)?.clone()))).collect()
}

fn each(object: &Value, key: &str, f: impl Fn(&Value) -> Value) -> Option<Value> {
    Some(object.get(key)?.as_array()?.iter().map(f).collect())
}

/// Copies the fields of a pod that are safe to publish: names, numbers and images.
#[must_use]
pub fn pod(object: &Value) -> Value {
    let (empty, null) = (json!({}), Value::Null);
    let metadata = pick(
        object.get("metadata").unwrap_or(&empty),
        &[
            "name",
            "namespace",
            "uid",
            "resourceVersion",
            "generation",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "ownerReferences",
            "finalizers",
        ],
    );
    let spec = object.get("spec").unwrap_or(&null);
    let mut out = pick(
        spec,
        &[
            "nodeName",
            "restartPolicy",
            "terminationGracePeriodSeconds",
            "activeDeadlineSeconds",
            "priority",
            "priorityClassName",
            "hostNetwork",
            "hostPID",
            "hostIPC",
            "dnsPolicy",
            "serviceAccountName",
            "schedulerName",
            "preemptionPolicy",
        ],
    );
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        out.extend(each(spec, list, container).map(|v| (list.to_owned(), v)));
    }
    out.extend(each(spec, "volumes", volume).map(|v| ("volumes".to_owned(), v)));
    json!({"metadata": metadata, "spec": out, "status": status(object.get("status").unwrap_or(&null))})
}

fn container(spec: &Value) -> Value {
    let mut out = pick(
        spec,
        &[
            "name",
            "image",
            "imagePullPolicy",
            "ports",
            "resources",
            "restartPolicy",
            "tty",
            "stdin",
            "workingDir",
        ],
    );
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        if let Some(p) = spec.get(probe) {
            let numbers = pick(
                p,
                &[
                    "initialDelaySeconds",
                    "periodSeconds",
                    "timeoutSeconds",
                    "successThreshold",
                    "failureThreshold",
                    "terminationGracePeriodSeconds",
                ],
            );
            out.insert(probe.to_owned(), numbers.into());
        }
    }
    // The name of a variable helps the diagnosis; its value stays on the machine.
    out.extend(
        each(spec, "env", |e| json!({"name": e.get("name"), "value": REDACTED}))
            .map(|v| ("env".to_owned(), v)),
    );
    out.extend(
        each(spec, "volumeMounts", |m| pick(m, &["name", "mountPath", "readOnly"]).into())
            .map(|v| ("volumeMounts".to_owned(), v)),
    );
    out.into()
}

/// Copies the name and the type of a volume.
fn volume(spec: &Value) -> Value {
    let kind = spec.as_object().and_then(|map| map.keys().find(|k| *k != "name").cloned());
    json!({"name": spec.get("name"), "kind": kind})
}

fn status(status: &Value) -> Value {
    let mut out = pick(
        status,
        &[
            "phase",
            "reason",
            "hostIP",
            "podIP",
            "podIPs",
            "startTime",
            "qosClass",
            "observedGeneration",
            "nominatedNodeName",
        ],
    );
    let condition =
        |c: &Value| pick(c, &["type", "status", "reason", "lastTransitionTime", "observedGeneration"]).into();
    out.extend(each(status, "conditions", condition).map(|v| ("conditions".to_owned(), v)));
    for list in ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"] {
        let one = |c: &Value| {
            let mut out =
                pick(c, &["name", "ready", "started", "restartCount", "image", "imageID", "containerID"]);
            for key in ["state", "lastState"] {
                let states =
                    c.get(key).and_then(Value::as_object).into_iter().flatten().map(|(name, state)| {
                        // Without the message, which the container wrote (terminationMessagePath).
                        (
                            name.clone(),
                            pick(state, &["reason", "exitCode", "signal", "startedAt", "finishedAt"]).into(),
                        )
                    });
                out.insert(key.to_owned(), Value::Object(states.collect()));
            }
            out.into()
        };
        out.extend(each(status, list, one).map(|v| (list.to_owned(), v)));
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_fields_of_a_pod_are_copied() {
        let secret = "hunter2-hunter2";
        let object = json!({
            "metadata": {"name": "web", "annotations": {"kubectl.kubernetes.io/last-applied-configuration": secret}, "labels": {"l": secret}},
            "spec": {
                "nodeName": "n1",
                "containers": [{
                    "name": "a", "image": "i", "args": [format!("--password={secret}")], "command": [secret],
                    "env": [{"name": "PASSWORD", "value": secret}],
                    "livenessProbe": {"periodSeconds": 3, "exec": {"command": [secret]}, "httpGet": {"httpHeaders": [{"name": "Authorization", "value": secret}]}},
                    "lifecycle": {"preStop": {"exec": {"command": [secret]}}},
                }],
                "volumes": [{"name": "v", "csi": {"volumeAttributes": {"key": secret}}}],
                "somethingNew": secret,
            },
            "status": {"phase": "Running", "message": secret, "containerStatuses": [
                {"name": "a", "restartCount": 2, "lastState": {"terminated": {"exitCode": 3, "message": secret}}}]},
        });
        let out = pod(&object);
        assert!(!out.to_string().contains(secret), "{out:#}");
        assert_eq!(out["spec"]["containers"][0]["livenessProbe"]["periodSeconds"], 3);
        assert_eq!(out["spec"]["containers"][0]["env"][0]["name"], "PASSWORD");
        assert_eq!(out["spec"]["volumes"][0]["kind"], "csi");
        assert_eq!(out["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"], 3);
        let mut found = BTreeSet::new();
        suspects(&object, &mut found);
        assert!(found.contains(secret) && found.contains(&format!("--password={secret}")), "{found:?}");
    }

    #[test]
    fn known_values_and_formats_of_credentials_are_removed_from_texts() {
        let known = ["hunter2-hunter2", "with \"quotes\" in it", "true"];
        let suspects = known.map(str::to_owned).into();
        let scrubber = Scrubber::new(Values { suspects, ..Values::default() });
        for (text, want) in [
            ("event: exit of hunter2-hunter2!", "event: exit of [redacted]!"),
            (r#"{"m":"with \"quotes\" in it"}"#, r#"{"m":"[redacted]"}"#),
            ("ready=true", "ready=true"),
            ("Authorization: Bearer abc.def-123", "Authorization: Bearer [redacted]"),
            ("got eyJhbGciOi.eyJpc3Mi.c2ln now", "got [redacted] now"),
            ("-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\nrest", "[redacted]\nrest"),
            ("join abcdef.0123456789abcdef", "join [redacted]"),
            ("https://user:pa55@host/x", "https://[redacted]@host/x"),
            ("db_password=topsecret next", "db_password=[redacted] next"),
            (r#""token": "x1y2z3","a":1"#, r#""token": "[redacted]","a":1"#),
            ("pod web is Running", "pod web is Running"),
        ] {
            assert_eq!(scrubber.text(text), want);
        }
    }

    #[test]
    fn values_of_secrets_of_any_length_are_removed() {
        let secrets = ["x", "7", "p$", "true", "longer-secret", ""].map(str::to_owned).into();
        let scrubber = Scrubber::new(Values { secrets, ..Values::default() });
        for (text, want) in [
            ("password is x, key 7.", "password is [redacted], key [redacted]."),
            ("x", "[redacted]"),
            ("x=x xx x", "[redacted]=[redacted] xx [redacted]"),
            (r#"{"message":"x"}"#, r#"{"message":"[redacted]"}"#),
            ("exit 17 of max_x", "exit 17 of max_x"),
            ("got p$ here and ap$", "got [redacted] here and ap$"),
            ("ready=true untrue", "ready=[redacted] untrue"),
            ("in-longer-secret-s", "in-[redacted]-s"),
        ] {
            assert_eq!(scrubber.text(text), want, "{text}");
        }
    }

    #[test]
    fn variables_from_secrets_are_found_by_their_source() {
        let pod = json!({"spec": {
            "containers": [{
                "name": "a",
                "env": [
                    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                    {"name": "MAP", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
                    {"name": "S_OWN", "value": "own"},
                ],
                "envFrom": [{"prefix": "S_", "secretRef": {"name": "s"}}, {"configMapRef": {"name": "m"}}],
            }],
            "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "s"}}]}],
        }});
        let sources = |container: &str| {
            let mut found = BTreeSet::new();
            let environment =
                ["KEY=k", "MAP=m", "S_OWN=own", "S_A=x", "S_B=a=b", "B=2", "PATH=/bin", "HOSTNAME=web"];
            FromSecrets::of(&pod, container).values(environment, &mut found);
            found.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(sources("a"), ["a=b", "k", "x"]);
        assert_eq!(sources("i"), ["2", "a=b", "k", "m", "own", "x"]);
        assert!(sources("other").is_empty() && FromSecrets::of(&pod, "other").is_empty());
    }
}
