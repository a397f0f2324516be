//! Each message of the last release and of this version, read by the other one.

use std::collections::BTreeSet;

use prost_types::FieldDescriptorProto;

use crate::contract::Contract;
use crate::samples::{FieldValue, Meaning, read, samples};

/// Each call, field and value that the last release does not have, and what happens beside a service of that
/// release. A name without an entry fails the test below: decide first what an older peer does.
const FALLBACKS: [(&str, &str); 26] = [
    ("quintlet.debug.v1.BuildReply.refused_peers", "an older service refuses no peer and sends none"),
    (
        "quintlet.debug.v1.Control.Profile",
        "quintctl profile reports that the service does not serve the call; nothing else calls it",
    ),
    (
        "quintlet.debug.v1.Control.SetLogFilter",
        "quintctl log-level reports that the service does not serve the call; nothing else calls it",
    ),
    (
        "quintlet.pleg.v1.Container.stop_signal",
        "an older pleg-service sends none: the status has no stopSignal",
    ),
    ("quintlet.podsync.v1.Claims.List", "quintctl claims reports that pod-sync does not serve the call"),
    ("quintlet.podsync.v1.Cpus.List", "quintctl cpus reports that pod-sync does not serve the call"),
    ("quintlet.podsync.v1.Devices.List", "quintctl devices reports that pod-sync does not serve the call"),
    (
        "quintlet.podsync.v1.ExplainReply.volumes",
        "an older pod-sync sends none: quintctl explain shows no volumes",
    ),
    (
        "quintlet.podsync.v1.PodStorage.termination_logs",
        "an older pod-sync sends none: the summary counts none",
    ),
    ("quintlet.podsync.v1.Pressure.Get", "quintctl pressure reports that pod-sync does not serve the call"),
    ("quintlet.podsync.v1.VolumeStorage.claim", "an older pod-sync sends none: the summary has no pvcRef"),
    ("quintlet.podsync.v1.Volumes.List", "quintctl volumes reports that pod-sync does not serve the call"),
    ("quintlet.podsync.v1.WatchPodsRequest.for_statistics", "an older pod-sync sends whole pods"),
    (
        "quintlet.probe.v1.Grpc.tls",
        "pod-sync leaves the probe out until probe-service is upgraded: an older one would probe without TLS, and fail",
    ),
    (
        "quintlet.probe.v1.HttpGet.h2c",
        "pod-sync leaves the probe out until probe-service is upgraded: an older one would probe with HTTP/1.1",
    ),
    ("quintlet.probe.v1.ProbeSpec.period_ms", "an older probe-service uses period_seconds"),
    (
        "quintlet.runtime.v1.HintKind.HINT_KIND_EXITING",
        "an older pleg-service ignores the hint: HINT_KIND_EXITED follows, or pod-sync observes the pod",
    ),
    (
        "quintlet.status.v1.AckKind.ACK_KIND_RETRYING",
        "an older pod-sync ignores the ack and keeps the status as not written, which it is",
    ),
    (
        "quintlet.status.v1.RecordEventRequest.annotations",
        "an older status-reporter records the event without annotations",
    ),
    (
        "quintlet.status.v1.RecordEventRequest.at_unix_ns",
        "an older status-reporter takes the time of the request",
    ),
    (
        "quintlet.status.v1.RecordEventRequest.id",
        "an older status-reporter counts a repeated request as one more occurrence",
    ),
    (
        "quintlet.status.v1.RecordEventRequest.trace",
        "an older status-reporter writes the event without a span, and an older pod-sync sends none",
    ),
    (
        "quintlet.status.v1.StatusReporter.NodeVolumes",
        "pod-sync repeats the call until status-reporter serves it; volumes that wait for an attachment wait meanwhile",
    ),
    (
        "quintlet.subscribe.v1.Containers.Watch",
        "an older pleg-service has no socket for subscribers: a subscriber cannot connect, and connects again",
    ),
    (
        "quintlet.subscribe.v1.Pods.Watch",
        "an older pod-sync has no socket for subscribers: a subscriber cannot connect, and connects again",
    ),
    (
        "quintlet.subscribe.v1.Probes.Watch",
        "an older probe-service has no socket for subscribers: a subscriber cannot connect, and connects again",
    ),
];

/// Calls whose answer was one message in the last release and is a stream now: the client of a stream reads
/// one message as its only item, and an older client reads the first item as the message (`buf.yaml`).
const NOW_STREAMS: [&str; 5] = [
    "quintlet.debug.v1.Debug.Metrics",
    "quintlet.debug.v1.Debug.Traces",
    "quintlet.podsync.v1.PodSync.ListEvents",
    "quintlet.podsync.v1.PodSync.ListPods",
    "quintlet.podsync.v1.Storage.List",
];

/// Returns the differences between what a message of `writer` means for it and for `reader`.
fn differences(writer: &Contract, reader: &Contract) -> Vec<String> {
    let mut found = Vec::new();
    for name in writer.messages.keys().filter(|name| reader.messages.contains_key(*name)) {
        for bytes in samples(writer, reader, name) {
            let meant = read(writer, name, &bytes).unwrap();
            assert!(!meant.0.keys().any(|field| field.starts_with('?')), "{name}: {meant:?}");
            match read(reader, name, &bytes) {
                Err(error) => found.push(format!("{name}: {error}")),
                Ok(understood) => {
                    if known(&meant, &understood) != without_unknown(&understood) {
                        found.push(format!("{name}: {meant:?} is read as {understood:?}"));
                    }
                }
            }
        }
    }
    found
}

/// Returns the part of a message that the reader has as fields of the same numbers: those whose names it does
/// not show as unknown.
fn known(meant: &Meaning, understood: &Meaning) -> Meaning {
    let unknown = understood.0.keys().filter(|field| field.starts_with('?')).count();
    let mut fields = meant.0.clone();
    if unknown > 0 {
        fields.retain(|name, _| understood.0.contains_key(name));
    }
    for (name, values) in &mut fields {
        let others = understood.0.get(name).map(Vec::as_slice).unwrap_or_default();
        for (value, other) in values.iter_mut().zip(others) {
            if let (FieldValue::Nested(inner), FieldValue::Nested(other)) = (value, other) {
                *inner = known(inner, other);
            }
        }
    }
    Meaning(fields)
}

fn without_unknown(meaning: &Meaning) -> Meaning {
    let plain = |value: &FieldValue| match value {
        FieldValue::Text(text) => FieldValue::Text(text.clone()),
        FieldValue::Nested(inner) => FieldValue::Nested(without_unknown(inner)),
    };
    let fields = meaning.0.iter().filter(|(name, _)| !name.starts_with('?'));
    Meaning(fields.map(|(name, values)| (name.clone(), values.iter().map(plain).collect())).collect())
}

fn field<'a>(contract: &'a mut Contract, message: &str, name: &str) -> &'a mut FieldDescriptorProto {
    let message = contract.messages.get_mut(message).unwrap();
    message.field.iter_mut().find(|field| field.name() == name).unwrap()
}

#[test]
fn each_message_of_the_last_release_keeps_its_meaning_for_this_version_and_the_reverse() {
    let (earlier, current) = (Contract::last_release(), Contract::current());
    assert!(earlier.messages.len() > 50, "{}", earlier.messages.len());
    for name in earlier.messages.keys() {
        assert!(current.messages.contains_key(name), "{name} is gone");
    }
    assert_eq!(differences(&earlier, &current), Vec::<String>::new());
    assert_eq!(differences(&current, &earlier), Vec::<String>::new());
    for (name, message) in &earlier.messages {
        for before in &message.field {
            let now = current.messages[name].field.iter().find(|now| now.number() == before.number());
            let now = now.unwrap_or_else(|| panic!("{name}.{} is gone", before.name()));
            assert_eq!(
                now.proto3_optional(),
                before.proto3_optional(),
                "absence of {name}.{}",
                before.name()
            );
        }
    }
}

#[test]
fn each_call_of_the_last_release_has_the_types_that_it_had() {
    let current = Contract::current();
    for (name, before) in Contract::last_release().calls {
        let mut now = current.calls.get(&name).unwrap_or_else(|| panic!("{name} is gone")).clone();
        if NOW_STREAMS.contains(&name.as_str()) {
            assert!(now.reply.1, "{name} is no stream");
            now.reply.1 = false;
        }
        assert_eq!(now, before, "{name}");
    }
}

#[test]
fn each_addition_since_the_last_release_says_what_an_older_peer_does() {
    let additions = Contract::current().additions_to(&Contract::last_release());
    let declared: BTreeSet<String> = FALLBACKS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let undeclared: Vec<&String> = additions.difference(&declared).collect();
    assert!(undeclared.is_empty(), "no fallback for an older peer: {undeclared:#?}");
    let unneeded: Vec<&String> = declared.difference(&additions).collect();
    assert!(unneeded.is_empty(), "fallbacks for what the last release has: {unneeded:#?}");
    assert!(FALLBACKS.iter().all(|(_, fallback)| !fallback.is_empty()));
}

#[test]
fn a_change_of_a_number_a_type_a_name_or_an_enum_is_found_in_both_directions() {
    use prost_types::field_descriptor_proto::Type;

    type Change = fn(&mut Contract);
    const UPDATE: &str = "quintlet.status.v1.PodStatusUpdate";
    let earlier = Contract::last_release();
    let changes: [(&str, Change); 4] = [
        ("the numbers of two fields", |changed| {
            field(changed, UPDATE, "name").number = Some(4);
            field(changed, UPDATE, "namespace").number = Some(3);
        }),
        ("a type", |changed| field(changed, UPDATE, "uid").set_type(Type::Uint64)),
        ("a name", |changed| field(changed, UPDATE, "could_run").name = Some("runs".to_owned())),
        ("the name of a value", |changed| {
            let kinds = changed.enums.get_mut("quintlet.status.v1.AckKind").unwrap();
            let (_, last) = kinds.iter_mut().last().unwrap();
            *last = "ACK_KIND_OTHER".to_owned();
        }),
    ];
    for (what, change) in changes {
        let mut changed = earlier.clone();
        change(&mut changed);
        assert!(!differences(&earlier, &changed).is_empty(), "{what}");
        assert!(!differences(&changed, &earlier).is_empty(), "{what}");
    }
    let mut fewer = earlier.clone();
    fewer.messages.get_mut(UPDATE).unwrap().field.pop();
    fewer.calls.remove("quintlet.status.v1.StatusReporter.UpdateNode");
    fewer.enums.get_mut("quintlet.status.v1.AckKind").unwrap().remove(&2);
    let additions: Vec<String> = earlier.additions_to(&fewer).into_iter().collect();
    assert_eq!(
        additions,
        [
            "quintlet.status.v1.AckKind.ACK_KIND_GONE",
            "quintlet.status.v1.PodStatusUpdate.mirror",
            "quintlet.status.v1.StatusReporter.UpdateNode",
        ]
    );
    assert_eq!(
        differences(&earlier, &fewer),
        Vec::<String>::new(),
        "a field that the reader does not know is skipped"
    );
}
