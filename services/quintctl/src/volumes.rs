//! `quintctl volumes`: volumes of pods, with their state, the call in progress and the last error.

use quintctl_text::{NOTHING, age, clean, now_ns, or_nothing, short_name, table};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::volumes_client::VolumesClient;
use quintlet_proto::podsync::v1::{ListVolumesRequest, VolumeState, VolumeView};
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};
use crate::pods::time;

/// List volumes of pods.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct VolumesArgs {
    /// Only volumes of pods of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
}

pub(crate) async fn run(args: VolumesArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = VolumesClient::new(peer.channel().await?);
    let mut volumes = peer.list(client.list(ListVolumesRequest {})).await?.volumes;
    if let Some(namespace) = &args.namespace {
        volumes.retain(|volume| {
            volume.pod.split_once('/').is_some_and(|(pod_namespace, _)| pod_namespace == namespace)
        });
    }
    let data: Vec<VolumeData> = volumes.iter().map(VolumeData::from).collect();
    print(format.render(&data, |wide| render(&volumes, now_ns(), wide))?)
}

/// Formats the table with ages relative to `now`, nanoseconds since 1970; `wide` adds the unique name and the
/// UID of the pod.
#[must_use]
pub(crate) fn render(volumes: &[VolumeView], now: i64, wide: bool) -> String {
    if volumes.is_empty() {
        return "no volumes\n".to_owned();
    }
    let mut header = vec!["POD", "VOLUME", "SOURCE", "STATE", "CALL", "AGE"];
    if wide {
        header.extend(["NAME", "POD UID"]);
    }
    header.push("LAST ERROR");
    let row = |volume: &VolumeView| {
        let mut row = vec![
            short_name(&volume.pod, &volume.pod_uid),
            or_nothing(&volume.name),
            or_nothing(source(volume)),
            state(volume).to_owned(),
            or_nothing(&volume.call),
            since(volume).map_or_else(|| NOTHING.to_owned(), |since| age(now - since)),
        ];
        if wide {
            row.extend([or_nothing(&volume.volume), or_nothing(&volume.pod_uid)]);
        }
        row.push(error(volume, now));
        row
    };
    table(&header, &volumes.iter().map(row).collect::<Vec<_>>())
}

/// Returns what a pod waits for from a volume, or how the volume failed last; `None` for a mounted volume
/// without an error.
#[must_use]
pub(crate) fn explanation(volume: &VolumeView, now: i64) -> Option<String> {
    let mut out = match (volume.call.as_str(), volume.state()) {
        ("", VolumeState::Mounted) if volume.error.is_empty() => return None,
        ("", _) => match since(volume) {
            Some(since) => format!("{} for {}", state(volume), age(now - since)),
            None => state(volume).to_owned(),
        },
        (call, _) => {
            format!("{}, {} for {}", state(volume), clean(call), age(now - volume.call_since_unix_ns))
        }
    };
    if !volume.error.is_empty() {
        out.push_str("; last error ");
        out.push_str(&error(volume, now));
    }
    Some(out)
}

/// Returns since when the call is in progress, or since when the pod waits for the volume.
fn since(volume: &VolumeView) -> Option<i64> {
    let wait = match volume.state() {
        VolumeState::NotMounted | VolumeState::NotAttached | VolumeState::Unresolved => {
            volume.needed_since_unix_ns
        }
        VolumeState::Uncertain | VolumeState::Mounted | VolumeState::Unspecified => 0,
    };
    [volume.call_since_unix_ns, wait].into_iter().find(|since| *since != 0)
}

/// Returns the name of the PersistentVolume, or the type of a volume that the pod describes itself.
fn source(volume: &VolumeView) -> &str {
    if volume.spec_name.is_empty() || volume.spec_name != volume.name {
        return &volume.spec_name;
    }
    let plugin = volume.volume.rsplit_once('/').map_or(volume.spec_name.as_str(), |(plugin, _)| plugin);
    plugin.strip_prefix("kubernetes.io/").unwrap_or(plugin)
}

fn state(volume: &VolumeView) -> &'static str {
    match volume.state() {
        VolumeState::Mounted => "mounted",
        VolumeState::Uncertain => "uncertain",
        VolumeState::NotMounted => "not mounted",
        VolumeState::NotAttached => "not attached",
        VolumeState::Unresolved => "unresolved",
        VolumeState::Unspecified => NOTHING,
    }
}

fn error(volume: &VolumeView, now: i64) -> String {
    match (volume.error.as_str(), volume.error_unix_ns) {
        ("", _) => String::new(),
        (error, 0) => clean(error),
        (error, at) => format!("{} ago: {}", age(now - at), clean(error)),
    }
}

/// A volume in JSON and YAML output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VolumeData {
    pod: String,
    pod_uid: String,
    name: String,
    spec_name: String,
    volume: String,
    state: &'static str,
    needed_since: Option<String>,
    call: String,
    call_since: Option<String>,
    error: String,
    error_time: Option<String>,
}

impl From<&VolumeView> for VolumeData {
    fn from(volume: &VolumeView) -> Self {
        Self {
            pod: volume.pod.clone(),
            pod_uid: volume.pod_uid.clone(),
            name: volume.name.clone(),
            spec_name: volume.spec_name.clone(),
            volume: volume.volume.clone(),
            state: match volume.state() {
                VolumeState::Mounted => "Mounted",
                VolumeState::Uncertain => "Uncertain",
                VolumeState::NotMounted => "NotMounted",
                VolumeState::NotAttached => "NotAttached",
                VolumeState::Unresolved => "Unresolved",
                VolumeState::Unspecified => "Unknown",
            },
            needed_since: time(volume.needed_since_unix_ns),
            call: volume.call.clone(),
            call_since: time(volume.call_since_unix_ns),
            error: volume.error.clone(),
            error_time: time(volume.error_unix_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000_000;
    const NOW: i64 = 1_800_000_000 * S;

    fn volume(pod: &str, name: &str, state: VolumeState) -> VolumeView {
        VolumeView {
            pod_uid: format!("uid-{pod}"),
            pod: pod.to_owned(),
            name: name.to_owned(),
            spec_name: format!("pv-{name}"),
            volume: format!("kubernetes.io/csi/d.csi^{name}"),
            state: state.into(),
            ..VolumeView::default()
        }
    }

    fn staging() -> VolumeView {
        VolumeView {
            call: "NodeStageVolume".to_owned(),
            call_since_unix_ns: NOW - 12 * S,
            error: "MountVolume.MountDevice failed for volume \"pv-data\" :\n rpc error".to_owned(),
            error_unix_ns: NOW - 73 * S,
            needed_since_unix_ns: NOW - 90 * S,
            ..volume("default/db-1", "data", VolumeState::NotMounted)
        }
    }

    #[test]
    fn the_table_has_the_state_the_call_and_the_last_error_of_each_volume() {
        let left = VolumeView {
            pod: String::new(),
            call: "NodeUnpublishVolume".to_owned(),
            call_since_unix_ns: NOW - 3 * S,
            ..volume("7", "", VolumeState::Uncertain)
        };
        let mounted = volume("default/db-0", "data", VolumeState::Mounted);
        let mounted = VolumeView { needed_since_unix_ns: NOW - 900 * S, ..mounted };
        let unattached = VolumeView {
            needed_since_unix_ns: NOW - 45 * S,
            ..volume("default/db-2", "data", VolumeState::NotAttached)
        };
        let unresolved = VolumeView {
            spec_name: String::new(),
            volume: String::new(),
            needed_since_unix_ns: NOW - 20 * S,
            error: "error processing PVC default/data-db-3: PVC is not bound".to_owned(),
            error_unix_ns: NOW - 5 * S,
            ..volume("default/db-3", "data", VolumeState::Unresolved)
        };
        let config = VolumeView {
            spec_name: "config".to_owned(),
            volume: "kubernetes.io/configmap/u4-config".to_owned(),
            needed_since_unix_ns: NOW - 4 * S,
            error: "MountVolume.SetUp failed for volume \"config\" : configmap \"c\" not found".to_owned(),
            error_unix_ns: NOW - S,
            ..volume("default/db-4", "config", VolumeState::NotMounted)
        };
        let volumes = [mounted, staging(), unattached, unresolved, config, left];
        assert_eq!(
            render(&volumes, NOW, false),
            "\
POD    VOLUME  SOURCE     STATE         CALL                 AGE  LAST ERROR
db-0   data    pv-data    mounted       –                    –
db-1   data    pv-data    not mounted   NodeStageVolume      12s  73s ago: MountVolume.MountDevice failed for volume \"pv-data\" :  rpc error
db-2   data    pv-data    not attached  –                    45s
db-3   data    –          unresolved    –                    20s  5s ago: error processing PVC default/data-db-3: PVC is not bound
db-4   config  configmap  not mounted   –                    4s   1s ago: MountVolume.SetUp failed for volume \"config\" : configmap \"c\" not found
uid-7  –       pv-        uncertain     NodeUnpublishVolume  3s
"
        );
        let wide = render(&volumes, NOW, true);
        assert!(wide.contains("kubernetes.io/csi/d.csi^data       uid-default/db-0"), "{wide}");
        assert_eq!(render(&[], NOW, false), "no volumes\n");
    }

    #[test]
    fn a_volume_is_explained_by_its_call_and_error_unless_it_is_mounted() {
        assert_eq!(explanation(&volume("a/b", "data", VolumeState::Mounted), NOW), None);
        assert_eq!(
            explanation(&volume("a/b", "data", VolumeState::NotMounted), NOW).as_deref(),
            Some("not mounted")
        );
        assert_eq!(
            explanation(&staging(), NOW).as_deref(),
            Some(
                "not mounted, NodeStageVolume for 12s; last error 73s ago: MountVolume.MountDevice failed for volume \
                 \"pv-data\" :  rpc error"
            )
        );
        let unattached = VolumeView {
            needed_since_unix_ns: NOW - 45 * S,
            ..volume("a/b", "data", VolumeState::NotAttached)
        };
        assert_eq!(explanation(&unattached, NOW).as_deref(), Some("not attached for 45s"));
        let republish = VolumeView { call: String::new(), call_since_unix_ns: 0, ..staging() };
        let republish = VolumeView { state: VolumeState::Mounted.into(), ..republish };
        assert!(explanation(&republish, NOW).unwrap().starts_with("mounted; last error 73s ago: "));
    }

    #[test]
    fn data_has_formatted_times_and_the_name_of_each_state() {
        let value = serde_json::to_value(VolumeData::from(&staging())).unwrap();
        assert_eq!((&value["state"], &value["call"]), (&"NotMounted".into(), &"NodeStageVolume".into()));
        assert_eq!(value["callSince"], "2027-01-15T07:59:48.000Z");
        assert_eq!(value["neededSince"], "2027-01-15T07:58:30.000Z");
        for (state, name, text) in [
            (VolumeState::Mounted, "Mounted", "mounted"),
            (VolumeState::Uncertain, "Uncertain", "uncertain"),
            (VolumeState::NotMounted, "NotMounted", "not mounted"),
            (VolumeState::NotAttached, "NotAttached", "not attached"),
            (VolumeState::Unresolved, "Unresolved", "unresolved"),
        ] {
            let volume = volume("default/a", "v", state);
            let value = serde_json::to_value(VolumeData::from(&volume)).unwrap();
            assert_eq!((value["state"].as_str(), super::state(&volume)), (Some(name), text));
        }
    }
}
