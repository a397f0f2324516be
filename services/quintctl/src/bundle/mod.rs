//! `quintctl debug-bundle`: collects diagnostic data of this node in one archive, without secrets.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use futures::StreamExt as _;
use quintctl_redaction as redact;
use quintctl_redaction::{FromSecrets, Scrubber, Values};
use quintctl_text::{clean, moment, now_ns};
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::{ContainerStatusRequest, ListContainersRequest};
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::debug::v1::{MetricsRequest, TracesRequest};
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{ListEventsRequest, ListPodsRequest};
use serde::Serialize;
use serde_json::{Value, json};

use crate::client::{MAX_RESPONSE_BYTES, Peer};
use crate::error::Error;
use crate::out::print;
use crate::{explain, health, pods, version};

/// Number of bytes taken from the end of each log.
const LOG_BYTES: u64 = 1 << 20;
/// Largest file of a secret volume that is read, in bytes: an API object is at most 1 MiB.
const SECRET_BYTES: u64 = 1 << 20;
/// Directory of secret volumes, below `volumes` of a pod's directory.
const SECRET_VOLUMES: &str = "kubernetes.io~secret";
/// Directory of projected volumes, whose sources may include Secrets.
const MIXED_VOLUMES: &str = "kubernetes.io~projected";
/// Number of concurrent ContainerStatus calls.
const MAX_STATUS_CALLS: usize = 8;

/// Collect diagnostic data in an archive, without secrets.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct BundleArgs {
    /// File to create [default: quintlet-debug-TIME.tar.gz in the working directory]
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Directory of the services' logs [default: beside the run directory, or /var/log/quintlet]
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,
    /// The node's root directory, whose volumes are read to find secrets to redact
    /// [default: beside the run directory, or /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    pub(crate) root_dir: Option<PathBuf>,
}

/// Writes the bundle. Its `missing.txt` lists the data that could not be collected.
///
/// # Errors
/// The file exists or cannot be written.
pub(crate) async fn run(args: BundleArgs, paths: &Paths) -> Result<(), Error> {
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
        "{}: {count} files; environments, arguments, annotations and secrets are left out\n",
        file.display()
    ))
}

/// Returns `given`, or the directory `name` beside a run directory of `quintctl up --base`, or `system`.
fn beside(given: Option<PathBuf>, run_dir: &Path, name: &str, system: &str) -> PathBuf {
    let beside = || Some(run_dir.parent()?.join(name)).filter(|dir| run_dir.ends_with("run") && dir.is_dir());
    given.or_else(beside).unwrap_or_else(|| PathBuf::from(system))
}

/// Collects the members of the bundle, as name and redacted text.
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
                missing.push(format!("values of Secrets in environments, to redact them: {error}"));
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
    let overview = health::overview(paths).await;
    out.push(("health.json".to_owned(), pretty(&overview.rows)));
    out.push(("health.txt".to_owned(), health::render(&overview.rows)));
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

/// Pod objects in full, redacted pods, problems of sources.
type Views = (Vec<Value>, Vec<Value>, Vec<Value>);

/// Fetches the pods. The full objects serve only to find values to redact.
async fn views(paths: &Paths) -> Result<Views, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?);
    let reply = peer.list(client.list_pods(ListPodsRequest { brief: false })).await?;
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
    let mut client = PodSyncClient::new(peer.channel().await?);
    let request = ListEventsRequest { uid: String::new(), limit: 0 };
    let events = peer.list(client.list_events(request)).await?.events;
    let one = |e: quintlet_proto::podsync::v1::EventView| json!({"at": moment(e.at_unix_ns), "pod": e.pod, "type": e.r#type, "reason": e.reason, "message": e.message, "count": e.count});
    Ok(events.into_iter().map(one).collect())
}

async fn metrics(peer: &Peer) -> Result<String, Error> {
    let mut client = DebugClient::new(peer.channel().await?);
    Ok(peer.list(client.metrics(MetricsRequest {})).await?.text)
}

async fn traces(peer: &Peer) -> Result<Vec<Value>, Error> {
    let mut client = DebugClient::new(peer.channel().await?);
    let spans = peer.list(client.traces(TracesRequest::default())).await?.spans;
    let one = |s: quintlet_proto::debug::v1::Span| {
        json!({"traceId": s.trace_id, "spanId": s.span_id, "parentSpanId": s.parent_span_id, "service": s.service, "name": s.name,
            "start": moment(s.start_unix_ns), "ns": s.end_unix_ns - s.start_unix_ns, "attributes": s.attributes.into_iter().collect::<std::collections::BTreeMap<_, _>>(), "error": s.error})
    };
    Ok(spans.into_iter().map(one).collect())
}

/// Reads the ends of the services' logs.
fn logs(dir: &Path) -> io::Result<Vec<(String, String)>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // The directory may contain other files, which may hold secrets.
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
        // The first line may begin in the middle of a secret, which would not be recognized.
        let whole =
            if length > LOG_BYTES { text.split_once('\n').map_or("", |(_, rest)| rest) } else { &text };
        out.push((format!("logs/{}", file_name(&name)), whole.to_owned()));
    }
    out.sort();
    Ok(out)
}

/// Returns the projected volumes of a pod with a Secret or a private key as a source, as pod UID and volume
/// name.
fn volumes_with_secrets(pod: &Value) -> Vec<(String, String)> {
    let uid = pod.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    let volumes = pod.pointer("/spec/volumes").and_then(Value::as_array).into_iter().flatten();
    let has_secret = |volume: &&Value| {
        let sources = volume.pointer("/projected/sources").and_then(Value::as_array);
        let is_secret =
            |source: &Value| ["secret", "podCertificate"].iter().any(|kind| source.get(kind).is_some());
        sources.into_iter().flatten().any(is_secret)
    };
    let names = volumes.filter(has_secret).filter_map(|volume| volume.get("name")?.as_str());
    names.map(|name| (uid.to_owned(), name.to_owned())).collect()
}

/// Adds the values of Secrets in the environments of containers to `out`. The runtime knows the environment
/// of each container.
async fn secrets_of_environments(
    paths: &Paths,
    pods: &[Value],
    out: &mut BTreeSet<String>,
) -> Result<(), Error> {
    let by_uid: BTreeMap<&str, &Value> =
        pods.iter().filter_map(|pod| Some((pod.pointer("/metadata/uid")?.as_str()?, pod))).collect();
    // Only the admin socket returns the verbose status with the environment.
    let peer = Peer::new("cri-proxy", paths.cri(CriSocket::Admin));
    let client =
        RuntimeServiceClient::new(peer.channel().await?).max_decoding_message_size(MAX_RESPONSE_BYTES);
    let listed = peer.call(client.clone().list_containers(ListContainersRequest::default())).await?;
    let wanted = listed.containers.iter().filter_map(|container| {
        let label = |name: &str| container.labels.get(name).map(String::as_str);
        let pod = by_uid.get(label("io.kubernetes.pod.uid")?)?;
        let sources = FromSecrets::of(pod, label("io.kubernetes.container.name")?);
        (!sources.is_empty()).then_some((container.id.clone(), sources))
    });
    let mut statuses = futures::stream::iter(wanted)
        .map(|(id, sources)| {
            let (mut client, peer) = (client.clone(), &peer);
            async move {
                let request = ContainerStatusRequest { container_id: id, verbose: true };
                // The container may have been removed since the list.
                let status = peer.call(client.container_status(request)).await.ok()?;
                Some((sources, environment(&status.info)))
            }
        })
        .buffer_unordered(MAX_STATUS_CALLS);
    while let Some(one) = statuses.next().await {
        if let Some((sources, environment)) = one {
            sources.values(environment.iter().map(String::as_str), out);
        }
    }
    Ok(())
}

/// Returns the environment from the OCI runtime specification, which containerd and CRI-O include in the
/// verbose status.
fn environment(info: &HashMap<String, String>) -> Vec<String> {
    let variables = |text: &String| -> Option<Vec<String>> {
        let info: Value = serde_json::from_str(text).ok()?;
        let env = info.pointer("/runtimeSpec/process/env")?.as_array()?;
        Some(env.iter().filter_map(|entry| Some(entry.as_str()?.to_owned())).collect())
    };
    info.get("info").and_then(variables).unwrap_or_default()
}

/// Adds the content of the volumes of all pods to `values`: the content of secret volumes and of the
/// projected volumes in `mixed` (pod UID and volume name) as secrets, the content of other projected volumes
/// as suspects.
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

/// Returns the kernel version, load, memory and pressure of the machine.
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

/// Replaces characters that are not safe in a file name.
fn file_name(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_') { c } else { '-' })
        .collect()
}

fn pretty(data: &impl Serialize) -> String {
    serde_json::to_string_pretty(data).unwrap_or_default() + "\n"
}

/// Writes the archive with mode 0600. An existing file is an error.
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
    fn a_letter_in_a_secret_volume_is_redacted_and_a_letter_in_another_volume_is_not() {
        let root = tempfile::tempdir().unwrap();
        let volume = |kind: &str, name: &str, content: &str| {
            let dir = root.path().join("pods/u1/volumes").join(kind).join(name).join("..data");
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("key"), content).unwrap();
        };
        volume(SECRET_VOLUMES, "s", "x\n");
        volume(MIXED_VOLUMES, "with-secret", "y");
        volume(MIXED_VOLUMES, "kube-api-access", "z");
        volume(MIXED_VOLUMES, "with-key", "w");
        let pod = json!({"metadata": {"uid": "u1"}, "spec": {"volumes": [
            {"name": "with-secret", "projected": {"sources": [{"configMap": {}}, {"secret": {"name": "s"}}]}},
            {"name": "with-key", "projected": {"sources": [{"podCertificate": {}}]}},
            {"name": "kube-api-access", "projected": {"sources": [{"serviceAccountToken": {}}]}},
        ]}});
        let mut values = Values::default();
        secrets_on_disk(root.path(), &volumes_with_secrets(&pod).into_iter().collect(), &mut values);
        assert_eq!(values.secrets, ["w", "x", "y"].map(str::to_owned).into());
        assert_eq!(values.suspects, ["z".to_owned()].into());
        let scrubber = Scrubber::new(values);
        assert_eq!(scrubber.text("w x y z"), "[redacted] [redacted] [redacted] z");
    }

    #[test]
    fn the_environment_is_read_from_the_verbose_status() {
        let info = r#"{"sandboxID": "s", "runtimeSpec": {"process": {"env": ["A=x", "B="]}}}"#;
        let status = HashMap::from([("info".to_owned(), info.to_owned())]);
        assert_eq!(environment(&status), ["A=x", "B="]);
        assert!(environment(&HashMap::from([("info".to_owned(), "{".to_owned())])).is_empty());
        assert!(environment(&HashMap::new()).is_empty());
    }
}
