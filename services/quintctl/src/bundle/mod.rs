//! `quintctl debug-bundle`: what somebody elsewhere needs to see what is wrong here, in one file, without a secret.

mod redact;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use futures::StreamExt as _;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{ContainerStatusRequest, ListContainersRequest};
use quintlet_kit::paths::{CriSocket, Paths};
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::debug::v1::{MetricsRequest, TracesRequest};
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{ListEventsRequest, ListPodsRequest};
use serde::Serialize;
use serde_json::{Value, json};

use crate::client::{MAX_ANSWER, Peer};
use crate::error::Error;
use crate::out::print;
use crate::text::{clean, moment, now_ns};
use crate::{explain, health, pods, version};
use redact::{FromSecrets, Scrubber, Values};

/// Of each log.
const LOG_BYTES: u64 = 1 << 20;
/// A file of a secret volume is at most so large (an object of the API is at most 1 MiB).
const SECRET_BYTES: u64 = 1 << 20;
/// Below the volumes of a pod's directory.
const SECRET_VOLUMES: &str = "kubernetes.io~secret";
/// The same, for volumes that may have Secrets among other things.
const MIXED_VOLUMES: &str = "kubernetes.io~projected";
/// How many containers' environments are asked for at a time.
const ASKED: usize = 8;

/// What is wrong here, in one file without secrets.
#[derive(Debug, Clone, clap::Args)]
pub struct BundleArgs {
    /// The file to make [default: quintlet-debug-TIME.tar.gz here]
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Directory of the services' logs [default: beside the run directory, or /var/log/quintlet]
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// The node's root directory: the secrets in its volumes are looked for, so that none is told [default: beside the run
    /// directory, or /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub root_dir: Option<PathBuf>,
}

/// Makes the bundle. What cannot be had is named in it.
///
/// # Errors
/// The file cannot be made.
pub async fn run(args: BundleArgs, paths: &Paths) -> Result<(), Error> {
    let now = now_ns();
    let name = format!("quintlet-debug-{}", moment(now).replace([':', '.'], "-"));
    let file = args.file.unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    let log_dir = beside(args.log_dir, paths.run(), "logs", "/var/log/quintlet");
    let root_dir = beside(args.root_dir, paths.run(), "root", "/var/lib/kubelet");
    let found = collect(paths, &log_dir, &root_dir).await;
    let failed = |source| Error::Os { action: format!("write {}", file.display()), source };
    let count = found.len();
    write(&file, &name, found, now).map_err(failed)?;
    print(format!(
        "{}: {count} files, no environment, arguments, annotations or secrets in them\n",
        file.display()
    ))
}

/// As given, beside the run directory where `quintctl up --base` puts both, or the usual place.
fn beside(given: Option<PathBuf>, run_dir: &Path, name: &str, usual: &str) -> PathBuf {
    let beside = || Some(run_dir.parent()?.join(name)).filter(|dir| run_dir.ends_with("run") && dir.is_dir());
    given.or_else(beside).unwrap_or_else(|| PathBuf::from(usual))
}

/// The members of the bundle.
async fn collect(paths: &Paths, log_dir: &Path, root_dir: &Path) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut missing = Vec::new();
    let mut values = Values::default();
    let mut mixed = BTreeSet::new();
    match views(paths).await {
        Ok((objects, list, problems)) => {
            for object in &objects {
                redact::suspects(object, &mut values.suspects);
                mixed.extend(volumes_with_secrets(object));
            }
            if let Err(error) = secrets_of_environments(paths, &objects, &mut values.secrets).await {
                missing.push(format!("environments, of which values of Secrets would be known: {error}"));
            }
            out.push(("pods.json".to_owned(), pretty(&json!({"pods": list, "problems": problems}))));
            for object in &objects {
                let uid = object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
                let Ok(reply) = explain::fetch(paths, uid).await else { continue };
                out.push((format!("explain/{}.txt", file_name(uid)), explain::render(&reply, now_ns())));
            }
        }
        Err(error) => missing.push(format!("pods: {}", quintlet_kit::error_chain(&error))),
    }
    secrets_on_disk(root_dir, &mixed, &mut values);
    match events(paths).await {
        Ok(events) => out.push(("events.json".to_owned(), pretty(&events))),
        Err(error) => missing.push(format!("events: {}", quintlet_kit::error_chain(&error))),
    }
    let look = health::look(paths).await;
    out.push(("health.json".to_owned(), pretty(&look.rows)));
    out.push(("health.txt".to_owned(), health::render(&look.rows)));
    let versions = version::fetch(paths).await;
    out.push(("version.json".to_owned(), pretty(&versions)));
    for peer in Peer::all(paths) {
        let name = file_name(&peer.service);
        match metrics(&peer).await {
            Ok(text) => out.push((format!("metrics/{name}.txt"), text)),
            Err(error) => missing.push(format!("metrics: {}", quintlet_kit::error_chain(&error))),
        }
        match traces(&peer).await {
            Ok(spans) => out.push((format!("traces/{name}.json"), pretty(&spans))),
            Err(error) => missing.push(format!("traces: {}", quintlet_kit::error_chain(&error))),
        }
    }
    match logs(log_dir) {
        Ok(logs) => out.extend(logs),
        Err(error) => missing.push(format!("logs in {}: {error}", log_dir.display())),
    }
    out.push(("machine.txt".to_owned(), machine()));
    out.push(("missing.txt".to_owned(), missing.iter().map(|m| clean(m) + "\n").collect()));
    let scrubber = Scrubber::new(values);
    out.into_iter().map(|(name, text)| (name, scrubber.text(&text))).collect()
}

type Views = (Vec<Value>, Vec<Value>, Vec<Value>);

/// The objects as they are, for what is to be searched for; and what may be told.
async fn views(paths: &Paths) -> Result<Views, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?).max_decoding_message_size(MAX_ANSWER);
    let reply = peer.answer(client.list_pods(ListPodsRequest { brief: false })).await?;
    let objects: Vec<Value> =
        reply.pods.iter().map(|p| serde_json::from_slice(&p.pod).unwrap_or_default()).collect();
    let list = reply
        .pods
        .iter()
        .zip(&objects)
        .map(|(view, object)| {
            let mut data = serde_json::to_value(pods::PodData::from(view)).unwrap_or_default();
            if let Some(data) = data.as_object_mut() {
                data.insert("pod".to_owned(), redact::pod(object));
            }
            data
        })
        .collect();
    let problems = reply
        .problems
        .iter()
        .map(|p| json!({"source": p.source, "origin": p.origin, "field": p.field, "message": p.message}))
        .collect();
    Ok((objects, list, problems))
}

async fn events(paths: &Paths) -> Result<Vec<Value>, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?).max_decoding_message_size(MAX_ANSWER);
    let request = ListEventsRequest { uid: String::new(), limit: 0 };
    let events = peer.answer(client.list_events(request)).await?.events;
    let one = |e: quintlet_proto::podsync::v1::EventView| json!({"at": moment(e.at_unix_ns), "pod": e.pod, "type": e.r#type, "reason": e.reason, "message": e.message, "count": e.count});
    Ok(events.into_iter().map(one).collect())
}

async fn metrics(peer: &Peer) -> Result<String, Error> {
    let mut client = DebugClient::new(peer.channel().await?).max_decoding_message_size(MAX_ANSWER);
    Ok(peer.answer(client.metrics(MetricsRequest {})).await?.text)
}

async fn traces(peer: &Peer) -> Result<Vec<Value>, Error> {
    let mut client = DebugClient::new(peer.channel().await?).max_decoding_message_size(MAX_ANSWER);
    let spans = peer.answer(client.traces(TracesRequest::default())).await?.spans;
    let one = |s: quintlet_proto::debug::v1::Span| {
        json!({"traceId": s.trace_id, "spanId": s.span_id, "parentSpanId": s.parent_span_id, "service": s.service, "name": s.name,
            "start": moment(s.start_unix_ns), "ns": s.end_unix_ns - s.start_unix_ns, "attributes": s.attributes.into_iter().collect::<std::collections::BTreeMap<_, _>>(), "error": s.error})
    };
    Ok(spans.into_iter().map(one).collect())
}

/// The ends of the services' logs.
fn logs(dir: &Path) -> io::Result<Vec<(String, String)>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Nothing but logs, whatever else lies there.
        let is_log = [".log", ".log.1"].iter().any(|end| name.ends_with(end));
        if !is_log || !entry.file_type()?.is_file() {
            continue;
        }
        let mut file = File::open(entry.path())?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(LOG_BYTES).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        // A line that is cut may begin in the middle of what would be taken out.
        let whole =
            if length > LOG_BYTES { text.split_once('\n').map_or("", |(_, rest)| rest) } else { &text };
        out.push((format!("logs/{}", file_name(&name)), whole.to_owned()));
    }
    out.sort();
    Ok(out)
}

/// Projected volumes of a pod that have a Secret as a source, each as the pod's UID and its name.
fn volumes_with_secrets(pod: &Value) -> Vec<(String, String)> {
    let uid = pod.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    let volumes = pod.pointer("/spec/volumes").and_then(Value::as_array).into_iter().flatten();
    let has_secret = |volume: &&Value| {
        let sources = volume.pointer("/projected/sources").and_then(Value::as_array);
        sources.into_iter().flatten().any(|source| source.get("secret").is_some())
    };
    let names = volumes.filter(has_secret).filter_map(|volume| volume.get("name")?.as_str());
    names.map(|name| (uid.to_owned(), name.to_owned())).collect()
}

/// The values that containers have in their environment from Secrets, as the runtime gave them to the containers.
async fn secrets_of_environments(
    paths: &Paths,
    pods: &[Value],
    out: &mut BTreeSet<String>,
) -> Result<(), Error> {
    let by_uid: BTreeMap<&str, &Value> =
        pods.iter().filter_map(|pod| Some((pod.pointer("/metadata/uid")?.as_str()?, pod))).collect();
    // The other sockets do not tell environments.
    let peer = Peer::new("cri-proxy", paths.cri(CriSocket::Admin));
    let client = RuntimeServiceClient::new(peer.channel().await?).max_decoding_message_size(MAX_ANSWER);
    let listed = peer.answer(client.clone().list_containers(ListContainersRequest::default())).await?;
    let wanted = listed.containers.iter().filter_map(|container| {
        let label = |name: &str| container.labels.get(name).map(String::as_str);
        let pod = by_uid.get(label("io.kubernetes.pod.uid")?)?;
        let from = FromSecrets::of(pod, label("io.kubernetes.container.name")?);
        (!from.is_empty()).then_some((container.id.clone(), from))
    });
    let mut asked = futures::stream::iter(wanted)
        .map(|(id, from)| {
            let (mut client, peer) = (client.clone(), &peer);
            async move {
                let request = ContainerStatusRequest { container_id: id, verbose: true };
                // One that is gone meanwhile has no environment.
                let status = peer.answer(client.container_status(request)).await.ok()?;
                Some((from, environment(&status.info)))
            }
        })
        .buffer_unordered(ASKED);
    while let Some(one) = asked.next().await {
        if let Some((from, environment)) = one {
            from.values(environment.iter().map(String::as_str), out);
        }
    }
    Ok(())
}

/// The environment in what containerd and CRI-O tell of a container beyond the CRI: its OCI runtime specification.
fn environment(info: &HashMap<String, String>) -> Vec<String> {
    let of = |text: &String| -> Option<Vec<String>> {
        let info: Value = serde_json::from_str(text).ok()?;
        let env = info.pointer("/runtimeSpec/process/env")?.as_array()?;
        Some(env.iter().filter_map(|entry| Some(entry.as_str()?.to_owned())).collect())
    };
    info.get("info").and_then(of).unwrap_or_default()
}

/// The content of the secret volumes of all pods: it must be in none of the texts. Of projected volumes, those in `mixed` (a pod's
/// UID and a name) have Secrets; the rest are of the cluster or of users.
fn secrets_on_disk(root_dir: &Path, mixed: &BTreeSet<(String, String)>, values: &mut Values) {
    for pod in fs::read_dir(root_dir.join("pods")).into_iter().flatten().flatten() {
        let volumes = pod.path().join("volumes");
        read_below(&volumes.join(SECRET_VOLUMES), 4, &mut values.secrets);
        for volume in fs::read_dir(volumes.join(MIXED_VOLUMES)).into_iter().flatten().flatten() {
            let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
            let has_secret = mixed.contains(&(name(&pod), name(&volume)));
            let out = if has_secret { &mut values.secrets } else { &mut values.suspects };
            read_below(&volume.path(), 3, out);
        }
    }
}

fn read_below(dir: &Path, depth: u32, out: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(t) if t.is_dir() && depth > 0 => read_below(&path, depth - 1, out),
            Ok(t) if t.is_file() && entry.metadata().is_ok_and(|m| m.len() <= SECRET_BYTES) => {
                if let Ok(text) = fs::read_to_string(&path) {
                    out.insert(text.trim().to_owned());
                    out.extend(text.lines().map(|l| l.trim().to_owned()));
                }
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// Of the machine, not of its users.
fn machine() -> String {
    [
        "/proc/version",
        "/proc/uptime",
        "/proc/loadavg",
        "/proc/meminfo",
        "/proc/pressure/cpu",
        "/proc/pressure/memory",
        "/proc/pressure/io",
    ]
    .iter()
    .filter_map(|path| Some(format!("== {path}\n{}", fs::read_to_string(path).ok()?)))
    .collect()
}

/// Nothing that another program would take for a path.
fn file_name(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_') { c } else { '-' })
        .collect()
}

fn pretty(data: &impl Serialize) -> String {
    serde_json::to_string_pretty(data).unwrap_or_default() + "\n"
}

/// Readable for its owner alone; a file that is there is not replaced.
fn write(file: &Path, name: &str, members: Vec<(String, String)>, now: i64) -> io::Result<()> {
    let out = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    let mut tar = tar::Builder::new(GzEncoder::new(out, Compression::default()));
    let seconds = u64::try_from(now / 1_000_000_000).unwrap_or(0);
    for (member, text) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(seconds);
        tar.append_data(&mut header, format!("{name}/{member}"), text.as_bytes())?;
    }
    tar.into_inner()?.finish()?.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_letter_of_a_secret_volume_is_a_secret_and_one_of_another_is_not() {
        let root = tempfile::tempdir().unwrap();
        let volume = |kind: &str, name: &str, content: &str| {
            let dir = root.path().join("pods/u1/volumes").join(kind).join(name).join("..data");
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("key"), content).unwrap();
        };
        volume(SECRET_VOLUMES, "s", "x\n");
        volume(MIXED_VOLUMES, "with-secret", "y");
        volume(MIXED_VOLUMES, "kube-api-access", "z");
        let pod = json!({"metadata": {"uid": "u1"}, "spec": {"volumes": [
            {"name": "with-secret", "projected": {"sources": [{"configMap": {}}, {"secret": {"name": "s"}}]}},
            {"name": "kube-api-access", "projected": {"sources": [{"serviceAccountToken": {}}]}},
        ]}});
        let mut values = Values::default();
        secrets_on_disk(root.path(), &volumes_with_secrets(&pod).into_iter().collect(), &mut values);
        assert_eq!(values.secrets, ["x", "y"].map(str::to_owned).into());
        assert_eq!(values.suspects, ["z".to_owned()].into());
        let scrubber = Scrubber::new(values);
        assert_eq!(scrubber.text("x y z"), "[redacted] [redacted] z");
    }

    #[test]
    fn the_environment_is_found_in_what_the_runtime_tells() {
        let info = r#"{"sandboxID": "s", "runtimeSpec": {"process": {"env": ["A=x", "B="]}}}"#;
        let told = HashMap::from([("info".to_owned(), info.to_owned())]);
        assert_eq!(environment(&told), ["A=x", "B="]);
        assert!(environment(&HashMap::from([("info".to_owned(), "{".to_owned())])).is_empty());
        assert!(environment(&HashMap::new()).is_empty());
    }
}
