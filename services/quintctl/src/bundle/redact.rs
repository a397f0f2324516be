//! What leaves the machine in a bundle, and what does not. Objects are copied field by field: only what is named here is
//! taken. Texts are scrubbed of every value that comes from a Secret, however short, of longer values that a user wrote, and of
//! whatever looks like a credential.

use std::collections::BTreeSet;

use regex::Regex;
use serde_json::{Map, Value, json};

/// In place of what was taken out.
pub(super) const REDACTED: &str = "[redacted]";

/// A shorter value is taken out only where it stands alone, and only if it comes from a Secret: inside of words it would make
/// every text unreadable, and what a user wrote elsewhere, such as `1` or `true`, is no secret.
const SHORT: usize = 6;

/// Values that may be secret.
#[derive(Debug, Default)]
pub(super) struct Values {
    /// From Secrets.
    pub(super) secrets: BTreeSet<String>,
    /// Written by users elsewhere: environment, arguments, annotations.
    pub(super) suspects: BTreeSet<String>,
}

/// Values that must not be told, and forms they usually have.
pub(super) struct Scrubber {
    /// Longest first, so that none leaves a part of another.
    values: Vec<String>,
    /// Short values of Secrets.
    words: Vec<String>,
    forms: Vec<(Regex, String)>,
}

impl Scrubber {
    /// Takes out `values`.
    pub(super) fn new(values: Values) -> Self {
        let Values { secrets, suspects } = values;
        let (words, secrets): (Vec<String>, Vec<String>) =
            secrets.into_iter().filter(|v| !v.is_empty()).partition(|v| v.len() < SHORT);
        let suspects = suspects.into_iter().filter(|v| v.len() >= SHORT);
        let values: BTreeSet<String> = secrets.into_iter().chain(suspects).collect();
        let mut values: Vec<String> = values.into_iter().collect();
        values.sort_by_key(|v| std::cmp::Reverse(v.len()));
        let forms = [
            // PEM of a private key, on one line or many.
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
        let forms =
            forms.into_iter().filter_map(|(form, with)| Some((Regex::new(form).ok()?, with))).collect();
        Self { values, words, forms }
    }

    pub(super) fn text(&self, text: &str) -> String {
        let mut out = text.to_owned();
        for value in &self.values {
            out = out.replace(value.as_str(), REDACTED);
            // As it stands in JSON.
            let quoted = Value::from(value.as_str()).to_string();
            out = out.replace(quoted.trim_matches('"'), REDACTED);
        }
        for word in &self.words {
            out = without_word(&out, word);
        }
        for (form, with) in &self.forms {
            out = form.replace_all(&out, with.as_str()).into_owned();
        }
        out
    }
}

/// The text with `word` taken out wherever it stands alone.
fn without_word(text: &str, word: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, found) = rest.split_at(at);
        let after = &found[word.len()..];
        // What was taken out so far ends in a bracket, which is no part of a word.
        let begins =
            before.chars().next_back().or_else(|| out.chars().next_back()).is_none_or(|c| !is_part(c));
        let ends = after.chars().next().is_none_or(|c| !is_part(c));
        let inner = |c: Option<char>| c.is_some_and(|c| !is_part(c));
        // A value that begins or ends with a sign is delimited by itself.
        let begins = begins || inner(word.chars().next());
        let ends = ends || inner(word.chars().next_back());
        out.push_str(before);
        out.push_str(if begins && ends { REDACTED } else { word });
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The environment of a container that comes from Secrets: names of single variables, and whether any Secret is taken in whole.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FromSecrets {
    /// By `secretKeyRef`.
    names: BTreeSet<String>,
    /// Prefixes of variables by `envFrom`, each with a Secret behind it.
    prefixes: Vec<String>,
    /// Variables that the container has by itself, whatever a Secret says.
    own: BTreeSet<String>,
}

impl FromSecrets {
    /// What the container `name` of a pod takes from Secrets.
    pub(super) fn of(pod: &Value, name: &str) -> Self {
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

    /// Whether there is anything.
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty() && self.prefixes.is_empty()
    }

    /// Takes the values out of an environment of `NAME=value`. A variable that may come from a Secret counts as such.
    pub(super) fn values<'a>(
        &self,
        environment: impl IntoIterator<Item = &'a str>,
        out: &mut BTreeSet<String>,
    ) {
        for (name, value) in environment.into_iter().filter_map(|entry| entry.split_once('=')) {
            let by_prefix = || {
                !self.own.contains(name)
                    && !of_image_or_cluster(name)
                    && self.prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()))
            };
            if self.names.contains(name) || by_prefix() {
                out.insert(value.to_owned());
                // A log has them line by line.
                out.extend(value.lines().map(str::to_owned));
            }
        }
    }
}

/// Variables that images and clusters give to every container. They cannot be told from a Secret's with no prefix.
fn of_image_or_cluster(name: &str) -> bool {
    matches!(name, "PATH" | "HOME" | "HOSTNAME" | "TERM" | "LANG")
        || ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT"].iter().any(|end| name.ends_with(end))
        || name.contains("_PORT_")
        || name.contains("_SERVICE_PORT_")
}

/// Every value of an object that may be a secret: environment, arguments, annotations, headers.
pub(super) fn suspects(object: &Value, out: &mut BTreeSet<String>) {
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
            // `--password=x` is told in parts, too.
            out.extend(text.split_once('=').map(|(_, v)| v.to_owned()));
        }
        Value::Array(list) => list.iter().for_each(|v| strings(v, out)),
        Value::Object(map) => map.values().for_each(|v| strings(v, out)),
        _ => {}
    }
}

fn pick(from: &Value, keys: &[&str]) -> Map<String, Value> {
    keys.iter().filter_map(|k| Some(((*k).to_owned(), from.get(*k)?.clone()))).collect()
}

fn each(from: &Value, key: &str, f: impl Fn(&Value) -> Value) -> Option<Value> {
    Some(from.get(key)?.as_array()?.iter().map(f).collect())
}

/// A pod without anything that a user wrote into it but names, numbers and images.
pub(super) fn pod(object: &Value) -> Value {
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

fn container(from: &Value) -> Value {
    let mut out = pick(
        from,
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
        if let Some(p) = from.get(probe) {
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
    // That there is a variable may matter; what it says does not leave the machine.
    out.extend(
        each(from, "env", |e| json!({"name": e.get("name"), "value": REDACTED}))
            .map(|v| ("env".to_owned(), v)),
    );
    out.extend(
        each(from, "volumeMounts", |m| pick(m, &["name", "mountPath", "readOnly"]).into())
            .map(|v| ("volumeMounts".to_owned(), v)),
    );
    out.into()
}

/// Name and kind.
fn volume(from: &Value) -> Value {
    let kind = from.as_object().and_then(|map| map.keys().find(|k| *k != "name").cloned());
    json!({"name": from.get("name"), "kind": kind})
}

fn status(from: &Value) -> Value {
    let mut out = pick(
        from,
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
    out.extend(each(from, "conditions", condition).map(|v| ("conditions".to_owned(), v)));
    for list in ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"] {
        let one = |c: &Value| {
            let mut out =
                pick(c, &["name", "ready", "started", "restartCount", "image", "imageID", "containerID"]);
            for key in ["state", "lastState"] {
                let states =
                    c.get(key).and_then(Value::as_object).into_iter().flatten().map(|(name, state)| {
                        // Without the message: it is what the container wrote at its end.
                        (
                            name.clone(),
                            pick(state, &["reason", "exitCode", "signal", "startedAt", "finishedAt"]).into(),
                        )
                    });
                out.insert(key.to_owned(), Value::Object(states.collect()));
            }
            out.into()
        };
        out.extend(each(from, list, one).map(|v| (list.to_owned(), v)));
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_pod_only_what_is_named_is_taken() {
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
    fn texts_lose_known_values_and_whatever_looks_like_a_credential() {
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
    fn values_of_secrets_are_taken_out_whatever_their_length() {
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
    fn the_environment_that_comes_from_secrets_is_known_by_its_source() {
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
        let of = |container: &str| {
            let mut found = BTreeSet::new();
            let environment =
                ["KEY=k", "MAP=m", "S_OWN=own", "S_A=x", "S_B=a=b", "B=2", "PATH=/bin", "HOSTNAME=web"];
            FromSecrets::of(&pod, container).values(environment, &mut found);
            found.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(of("a"), ["a=b", "k", "x"]);
        assert_eq!(of("i"), ["2", "a=b", "k", "m", "own", "x"]);
        assert!(of("other").is_empty() && FromSecrets::of(&pod, "other").is_empty());
    }
}
