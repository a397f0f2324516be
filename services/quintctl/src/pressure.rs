//! `quintctl pressure`: signals of evictions with their thresholds, conditions of the node, and the pod that
//! is evicted next.

use quintctl_text::{NOTHING, age, clean, now_ns, table};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::pressure_client::PressureClient;
use quintlet_proto::podsync::v1::{
    EvictionCandidate, GetPressureReply, GetPressureRequest, PressureCondition, PressureSignal,
    PressureThreshold,
};
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};
use crate::pods::time;

/// Age of a measurement above which it is reported as late, in nanoseconds. The interval is 10 s, and a
/// measurement may take 20 s.
const LATE: i64 = 35_000_000_000;

pub(crate) async fn run(paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PressureClient::new(peer.channel().await?);
    let reply = peer.call(client.get(GetPressureRequest {})).await?;
    print(format.render(&PressureData::from(&reply), |wide| render(&reply, now_ns(), wide))?)
}

/// Formats conditions and signals, with times relative to `now` in nanoseconds since 1970. `wide` adds what
/// the node reclaims before it evicts a pod.
#[must_use]
pub(crate) fn render(reply: &GetPressureReply, now: i64, wide: bool) -> String {
    if !reply.is_enabled {
        return "evictions are off: no thresholds are configured, and localStorageCapacityIsolation is false\n".to_owned();
    }
    if reply.measured_unix_ns == 0 {
        return "the node was not measured yet: the runtime has not answered, or pod-sync has just started\n"
            .to_owned();
    }
    let measured = now.saturating_sub(reply.measured_unix_ns);
    let late = if measured > LATE { ", late: no pod is evicted until a measurement succeeds" } else { "" };
    let mut out = format!("measured {} ago{late}\n\n", age(measured));
    let conditions: Vec<_> = reply.conditions.iter().map(|c| condition(c, now)).collect();
    out.push_str(&table(&["CONDITION", "STATUS"], &conditions));
    out.push('\n');
    let mut header = vec!["SIGNAL", "AVAILABLE", "THRESHOLD", "STATE", "EVICTED NEXT", "WHY"];
    if wide {
        header.push("RECLAIMED BEFORE");
    }
    let rows: Vec<_> = reply.signals.iter().flat_map(|signal| rows(signal, now, wide)).collect();
    out.push_str(&table(&header, &rows));
    out
}

fn condition(condition: &PressureCondition, now: i64) -> Vec<String> {
    let status = match (condition.is_true, condition.until_unix_ns) {
        (false, _) => "False".to_owned(),
        (true, 0) => "True".to_owned(),
        (true, until) => {
            let (left, ago) = (until.saturating_sub(now), now.saturating_sub(condition.last_crossed_unix_ns));
            format!(
                "True, threshold last crossed {} ago, False in {} if not crossed again",
                age(ago),
                age(left)
            )
        }
    };
    vec![clean(&condition.r#type), status]
}

/// Returns a row for each threshold of a signal, or one without a threshold. Only the first one names the
/// pod.
fn rows(signal: &PressureSignal, now: i64, wide: bool) -> Vec<Vec<String>> {
    let thresholds: Vec<_> = match signal.thresholds.as_slice() {
        [] => vec![None],
        all => all.iter().map(Some).collect(),
    };
    let row = |(at, threshold): (usize, Option<&PressureThreshold>)| {
        let mut row = vec![
            clean(&signal.signal),
            available(signal),
            threshold.map_or_else(|| NOTHING.to_owned(), |t| below(signal, t)),
            threshold.map_or_else(|| NOTHING.to_owned(), |t| state(t, now)),
        ];
        match (threshold, &signal.next) {
            (None, _) => row.extend([NOTHING.to_owned(), "without a threshold no pod is evicted".to_owned()]),
            (Some(_), _) if at > 0 => row.extend(["same".to_owned(), String::new()]),
            (Some(_), None) => row.extend([NOTHING.to_owned(), "no pod can be evicted".to_owned()]),
            (Some(_), Some(next)) => row.extend([pod(next), why(signal, next)]),
        }
        if wide {
            row.push(if signal.reclaims.is_empty() {
                NOTHING.to_owned()
            } else {
                clean(&signal.reclaims.join(", "))
            });
        }
        row
    };
    thresholds.into_iter().enumerate().map(row).collect()
}

fn available(signal: &PressureSignal) -> String {
    let (Some(available), Some(capacity)) = (signal.available, signal.capacity) else {
        return "not measured".to_owned();
    };
    let percent = i128::from(available).saturating_mul(100).checked_div(i128::from(capacity)).unwrap_or(0);
    format!("{} of {} ({percent}%)", amount(signal, available), amount(signal, capacity))
}

fn below(signal: &PressureSignal, threshold: &PressureThreshold) -> String {
    let value = threshold.value.map(|value| amount(signal, value));
    // The kubelet stores a share in 32 bits, so that 15% is 15.000001%.
    let percent = threshold.percent.map(|percent| (f64::from(percent) * 1000.0).round() / 1000.0);
    let mut out = match (percent, value) {
        (Some(percent), Some(value)) => format!("< {percent}% ({value})"),
        (Some(percent), None) => format!("< {percent}%"),
        (None, value) => format!("< {}", value.unwrap_or_default()),
    };
    if threshold.grace_ms > 0 {
        out.push_str(&format!(" for {}", age(threshold.grace_ms.saturating_mul(1_000_000))));
    }
    if threshold.minimum_reclaim > 0 {
        out.push_str(&format!(", ends {} above", amount(signal, threshold.minimum_reclaim)));
    }
    out
}

fn state(threshold: &PressureThreshold, now: i64) -> String {
    let left = threshold.due_unix_ns.saturating_sub(now);
    match threshold.crossed_since_unix_ns {
        0 => "ok".to_owned(),
        since if left > 0 => {
            format!("crossed {} ago, evicts in {}", age(now.saturating_sub(since)), age(left))
        }
        since => format!("crossed {} ago, evicts", age(now.saturating_sub(since))),
    }
}

fn pod(next: &EvictionCandidate) -> String {
    match next.namespace.as_str() {
        "default" => clean(&next.name),
        namespace => clean(&format!("{namespace}/{}", next.name)),
    }
}

fn why(signal: &PressureSignal, next: &EvictionCandidate) -> String {
    if !next.is_measured {
        return format!("no statistics, priority {}", next.priority);
    }
    let used = amount(signal, next.used);
    let usage = match signal.resource.as_str() {
        "pids" => format!("{used} processes"),
        "inodes" => format!("{used} inodes"),
        _ if next.request == 0 => format!("uses {used}, requests nothing"),
        _ if next.exceeds_request => {
            let excess = amount(signal, next.used.saturating_sub(next.request));
            format!("uses {used}, {excess} above its request")
        }
        _ => format!("uses {used}, below its request of {}", amount(signal, next.request)),
    };
    format!("{usage}, priority {}", next.priority)
}

fn amount(signal: &PressureSignal, value: i64) -> String {
    match signal.resource.as_str() {
        "inodes" | "pids" => value.to_string(),
        _ => bytes(value),
    }
}

/// Formats bytes with one decimal place and a binary suffix.
fn bytes(value: i64) -> String {
    const UNITS: [&str; 6] = ["", "Ki", "Mi", "Gi", "Ti", "Pi"];
    let mut unit = 0;
    let mut scale: i64 = 1;
    while unit + 1 < UNITS.len() && value / scale >= 1024 {
        scale *= 1024;
        unit += 1;
    }
    let tenths = i128::from(value) * 10 / i128::from(scale);
    match tenths % 10 {
        0 => format!("{}{}", tenths / 10, UNITS[unit]),
        tenth => format!("{}.{tenth}{}", tenths / 10, UNITS[unit]),
    }
}

/// The pressure in JSON and YAML output.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PressureData {
    is_enabled: bool,
    measured: Option<String>,
    conditions: Vec<ConditionData>,
    signals: Vec<SignalData>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ConditionData {
    r#type: String,
    status: &'static str,
    last_crossed: Option<String>,
    until: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SignalData {
    signal: String,
    resource: String,
    available: Option<i64>,
    capacity: Option<i64>,
    thresholds: Vec<ThresholdData>,
    reclaims: Vec<String>,
    next: Option<NextData>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ThresholdData {
    value: Option<i64>,
    percent: Option<f32>,
    minimum_reclaim: i64,
    grace_seconds: f64,
    crossed_since: Option<String>,
    due: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NextData {
    pod_uid: String,
    namespace: String,
    name: String,
    is_measured: bool,
    used: i64,
    request: i64,
    exceeds_request: bool,
    priority: i32,
}

impl From<&GetPressureReply> for PressureData {
    fn from(reply: &GetPressureReply) -> Self {
        let condition = |c: &PressureCondition| ConditionData {
            r#type: c.r#type.clone(),
            status: if c.is_true { "True" } else { "False" },
            last_crossed: time(c.last_crossed_unix_ns),
            until: time(c.until_unix_ns),
        };
        Self {
            is_enabled: reply.is_enabled,
            measured: time(reply.measured_unix_ns),
            conditions: reply.conditions.iter().map(condition).collect(),
            signals: reply.signals.iter().map(SignalData::from).collect(),
        }
    }
}

impl From<&PressureSignal> for SignalData {
    fn from(signal: &PressureSignal) -> Self {
        let threshold = |t: &PressureThreshold| ThresholdData {
            value: t.value,
            percent: t.percent,
            minimum_reclaim: t.minimum_reclaim,
            grace_seconds: std::time::Duration::from_millis(u64::try_from(t.grace_ms).unwrap_or(0))
                .as_secs_f64(),
            crossed_since: time(t.crossed_since_unix_ns),
            due: time(t.due_unix_ns),
        };
        let next = |n: &EvictionCandidate| NextData {
            pod_uid: n.pod_uid.clone(),
            namespace: n.namespace.clone(),
            name: n.name.clone(),
            is_measured: n.is_measured,
            used: n.used,
            request: n.request,
            exceeds_request: n.exceeds_request,
            priority: n.priority,
        };
        Self {
            signal: signal.signal.clone(),
            resource: signal.resource.clone(),
            available: signal.available,
            capacity: signal.capacity,
            thresholds: signal.thresholds.iter().map(threshold).collect(),
            reclaims: signal.reclaims.clone(),
            next: signal.next.as_ref().map(next),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000_000;
    const NOW: i64 = 1_800_000_000 * S;
    const GIB: i64 = 1 << 30;
    const MIB: i64 = 1 << 20;

    fn condition(kind: &str, last_crossed: i64, until: i64) -> PressureCondition {
        PressureCondition {
            r#type: kind.to_owned(),
            is_true: last_crossed != 0,
            last_crossed_unix_ns: last_crossed,
            until_unix_ns: until,
        }
    }

    fn signal(name: &str, resource: &str, available: i64, capacity: i64) -> PressureSignal {
        PressureSignal {
            signal: name.to_owned(),
            resource: resource.to_owned(),
            available: Some(available),
            capacity: Some(capacity),
            ..PressureSignal::default()
        }
    }

    fn next(name: &str, used: i64, request: i64) -> EvictionCandidate {
        EvictionCandidate {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            is_measured: true,
            used,
            request,
            exceeds_request: used > request,
            ..EvictionCandidate::default()
        }
    }

    fn reply() -> GetPressureReply {
        let hard = PressureThreshold { value: Some(100 * MIB), ..PressureThreshold::default() };
        let soft = PressureThreshold {
            value: Some(GIB),
            grace_ms: 90_000,
            crossed_since_unix_ns: NOW - 32 * S,
            due_unix_ns: NOW + 58 * S,
            ..PressureThreshold::default()
        };
        let share = PressureThreshold {
            value: Some(5 * GIB),
            percent: Some(10.0),
            minimum_reclaim: 500 * MIB,
            crossed_since_unix_ns: NOW - 4 * S,
            due_unix_ns: NOW - 4 * S,
            ..PressureThreshold::default()
        };
        let unknown = PressureThreshold { percent: Some(12.5), ..PressureThreshold::default() };
        let signals = vec![
            PressureSignal {
                thresholds: vec![hard, soft],
                next: Some(next("leak", 64 * MIB, 10 * MIB)),
                ..signal("memory.available", "memory", 900 * MIB, 24 * GIB)
            },
            PressureSignal {
                thresholds: vec![share],
                reclaims: vec!["dead containers".to_owned(), "unused images".to_owned()],
                next: Some(EvictionCandidate { namespace: "shop".to_owned(), ..next("db", GIB, 0) }),
                ..signal("nodefs.available", "ephemeral-storage", 4 * GIB, 50 * GIB)
            },
            PressureSignal {
                thresholds: vec![unknown],
                available: None,
                capacity: None,
                next: Some(EvictionCandidate { is_measured: false, priority: -5, ..next("new", 0, 0) }),
                ..signal("imagefs.inodesFree", "inodes", 0, 0)
            },
            PressureSignal {
                available: None,
                capacity: None,
                ..signal("containerfs.available", "ephemeral-storage", 0, 0)
            },
            signal("pid.available", "pids", 31_000, 32_768),
        ];
        let conditions = vec![
            condition("MemoryPressure", NOW - 10 * S, 0),
            condition("DiskPressure", NOW - 60 * S, NOW + 240 * S),
            condition("PIDPressure", 0, 0),
        ];
        GetPressureReply { is_enabled: true, measured_unix_ns: NOW - 3 * S, conditions, signals }
    }

    #[test]
    fn the_screen_has_a_row_for_each_threshold_with_its_state_and_the_next_pod() {
        assert_eq!(
            render(&reply(), NOW, false),
            "\
measured 3s ago

CONDITION       STATUS
MemoryPressure  True
DiskPressure    True, threshold last crossed 60s ago, False in 4m if not crossed again
PIDPressure     False

SIGNAL                 AVAILABLE             THRESHOLD                      STATE                           EVICTED NEXT  WHY
memory.available       900Mi of 24Gi (3%)    < 100Mi                        ok                              leak          uses 64Mi, 54Mi above its request, priority 0
memory.available       900Mi of 24Gi (3%)    < 1Gi for 90s                  crossed 32s ago, evicts in 58s  same
nodefs.available       4Gi of 50Gi (8%)      < 10% (5Gi), ends 500Mi above  crossed 4s ago, evicts          shop/db       uses 1Gi, requests nothing, priority 0
imagefs.inodesFree     not measured          < 12.5%                        ok                              new           no statistics, priority -5
containerfs.available  not measured          –                              –                               –             without a threshold no pod is evicted
pid.available          31000 of 32768 (94%)  –                              –                               –             without a threshold no pod is evicted
"
        );
    }

    #[test]
    fn bytes_have_one_decimal_place_at_most() {
        for (value, want) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (1536, "1.5Ki"),
            (100 * MIB, "100Mi"),
            (GIB + GIB / 2 + 1, "1.5Gi"),
            (i64::MAX, "8191.9Pi"),
        ] {
            assert_eq!(bytes(value), want);
        }
    }

    #[test]
    fn a_late_measurement_or_none_is_explained() {
        let mut reply = reply();
        reply.measured_unix_ns = NOW - 36 * S;
        assert!(render(&reply, NOW, false).starts_with("measured 36s ago, late: no pod is evicted until"));
        reply.measured_unix_ns = 0;
        assert!(render(&reply, NOW, false).starts_with("the node was not measured yet"));
        reply.is_enabled = false;
        assert!(render(&reply, NOW, false).starts_with("evictions are off"));
    }

    #[test]
    fn data_has_amounts_in_units_and_formatted_times() {
        let value = serde_json::to_value(PressureData::from(&reply())).unwrap();
        assert_eq!(value["measured"], "2027-01-15T07:59:57.000Z");
        assert_eq!(value["conditions"][1]["until"], "2027-01-15T08:04:00.000Z");
        let memory = &value["signals"][0];
        assert_eq!(memory["available"], 900 * MIB);
        assert_eq!(memory["thresholds"][1]["graceSeconds"], 90.0);
        assert_eq!(memory["thresholds"][0]["crossedSince"], serde_json::Value::Null);
        assert_eq!((&memory["next"]["name"], &memory["next"]["used"]), (&"leak".into(), &(64 * MIB).into()));
        assert_eq!(value["signals"][4]["next"], serde_json::Value::Null);
    }
}
