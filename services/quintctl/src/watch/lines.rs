//! The lines of the events of services.

use std::time::Duration;

use quintctl_text::{clean, now_ns, time_of_day, took};
use quintlet_proto::pleg::v1::{Lifecycle, LifecycleKind};
use quintlet_proto::probe::v1::{Evaluation, Outcome, ProbeType};
use serde::Serialize;

use crate::pods::display_name;

/// Width of the text column, in characters.
const TEXT_WIDTH: usize = 32;

/// One line of the output.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Line {
    /// Time of the change, nanoseconds since 1970.
    #[serde(serialize_with = "as_moment")]
    pub(crate) at: i64,
    /// `pleg`, `status`, `api`, `probe`, or `service` for a line about a service.
    pub(crate) source: &'static str,
    /// Display name of the pod, or name of the service.
    pub(crate) subject: String,
    pub(crate) text: String,
    /// Position in the source's sequence, or a duration: `epoch 7 rev 1182`, `rv 88123`, `0.9ms`.
    pub(crate) place: String,
    /// Nanoseconds since the change that caused this one: from a lifecycle event to the status, from a status
    /// to its write to the API server.
    #[serde(rename = "afterNs")]
    pub(crate) after: Option<i64>,
    /// UID of the pod; empty for a service.
    pub(crate) uid: String,
    /// The probe of an evaluation, and whether it succeeded.
    #[serde(skip)]
    pub(crate) probe: Option<(String, bool)>,
}

fn as_moment<S: serde::Serializer>(at: &i64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&quintctl_text::moment(*at))
}

#[must_use]
pub(crate) fn render(line: &Line) -> String {
    let at = time_of_day(line.at);
    if line.source == "service" {
        return format!("{at} ------ {} {}\n", line.subject, line.text);
    }
    let after = line.after.map(|ns| format!("  +{}", took(ns))).unwrap_or_default();
    let detail = format!("{}{after}", line.place);
    let gap = if line.text.chars().count() > TEXT_WIDTH { "  " } else { " " };
    let text =
        format!("{at} {:<6} {:<16} {:<TEXT_WIDTH$}{gap}{detail}", line.source, line.subject, line.text);
    format!("{}\n", text.trim_end())
}

#[must_use]
pub(crate) fn lifecycle_line(event: &Lifecycle, epoch: u64, rev: u64) -> Line {
    let what = if event.container.is_empty() { "Sandbox" } else { "Container" };
    let kind = match event.kind() {
        LifecycleKind::Started => "Started",
        LifecycleKind::Died => "Died",
        LifecycleKind::Removed => "Removed",
        LifecycleKind::Changed | LifecycleKind::Unspecified => "Changed",
    };
    let subject =
        if event.container.is_empty() { String::new() } else { format!(" {}", clean(&event.container)) };
    let exit = if event.kind() == LifecycleKind::Died && !event.container.is_empty() {
        format!(" exit={}", event.exit_code)
    } else {
        String::new()
    };
    Line {
        at: event.at_unix_ns,
        source: "pleg",
        subject: display_name(&event.pod_namespace, &event.pod_name),
        text: format!("{what}{kind}{subject}{exit}"),
        place: format!("epoch {epoch} rev {rev}"),
        uid: event.uid.clone(),
        ..Line::default()
    }
}

#[must_use]
pub(crate) fn probe_line(e: &Evaluation) -> Line {
    let kind = match e.r#type() {
        ProbeType::Startup => "startup",
        ProbeType::Readiness => "readiness",
        ProbeType::Liveness => "liveness",
        ProbeType::Unspecified => "probe",
    };
    let outcome = match e.outcome() {
        Outcome::Success => "success",
        Outcome::Failure => "failure",
        Outcome::Unknown | Outcome::Unspecified => "unknown",
    };
    // The streak saturates at the threshold of the probe, which is often 1.
    let streak = if e.run > 1 { format!(" (streak {})", e.run) } else { String::new() };
    let duration = Duration::try_from_secs_f64(e.seconds).unwrap_or_default();
    let duration = took(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX));
    let success = e.outcome() == Outcome::Success;
    let output =
        if success || e.output.is_empty() { String::new() } else { format!("  {}", clean(&e.output)) };
    Line {
        at: e.at_unix_ns,
        source: "probe",
        subject: display_name(&e.pod_namespace, &e.pod_name),
        text: format!("{kind} {} {outcome}{streak}", clean(&e.container)),
        place: format!("{duration}{output}"),
        uid: e.uid.clone(),
        probe: Some((format!("{} {} {kind}", e.uid, e.container), success)),
        ..Line::default()
    }
}

pub(super) fn service_line(service: &str, text: String) -> Line {
    Line { at: now_ns(), source: "service", subject: service.to_owned(), text, ..Line::default() }
}
