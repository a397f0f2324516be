//! `quintctl cpus`: the CPUs of the machine, the memory of its NUMA nodes, and the containers that have some
//! of their own.

use std::collections::BTreeMap;

use quintctl_text::{NOTHING, clean, or_nothing, short_name, table};
use quintlet_kit::args::paths::Paths;
use quintlet_model::cpu_list::CpuList;
use quintlet_proto::podsync::v1::cpus_client::CpusClient;
use quintlet_proto::podsync::v1::{
    CpuHolder, CpuUse, ListCpusReply, ListCpusRequest, MachineCpu, NodeMemory,
};
use serde_json::{Value, json};

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};

/// Lists the CPUs.
///
/// # Errors
/// pod-sync does not answer, or the output cannot be written.
pub(crate) async fn run(paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = CpusClient::new(peer.channel().await?);
    let reply = peer.list(client.list(ListCpusRequest {})).await?;
    print(format.render(&data(&reply), |wide| render(&reply, wide))?)
}

/// Formats the policies, the map of the CPUs, the memory, and the table of containers; `wide` adds the UIDs
/// of the pods.
#[must_use]
pub(crate) fn render(reply: &ListCpusReply, wide: bool) -> String {
    let policies = reply.policies.clone().unwrap_or_default();
    let [cpu, memory, topology, scope] =
        [&policies.cpu, &policies.memory, &policies.topology, &policies.scope].map(|name| or_nothing(name));
    let mut out =
        format!("CPU policy {cpu}, memory policy {memory}, topology policy {topology} (scope {scope})\n\n");
    out.push_str(&table(
        &["NUMA NODE", "SOCKET", "CPUS", "SHARED", "EXCLUSIVE", "RESERVED"],
        &nodes(&reply.cpus),
    ));
    if !reply.memory.is_empty() {
        out.push('\n');
        let row = |memory: &NodeMemory| {
            let NodeMemory { numa_node, kind, allocatable, free } = memory;
            vec![
                numa_node.to_string(),
                clean(kind),
                format!("{}Mi", allocatable >> 20),
                format!("{}Mi", free >> 20),
            ]
        };
        let rows: Vec<_> = reply.memory.iter().map(row).collect();
        out.push_str(&table(&["NUMA NODE", "MEMORY", "ALLOCATABLE", "FREE"], &rows));
    }
    if !reply.holders.is_empty() {
        out.push('\n');
        let mut header = vec!["POD", "CONTAINER", "EXCLUSIVE CPUS", "MEMORY NODES"];
        if wide {
            header.push("POD UID");
        }
        let row = |holder: &CpuHolder| {
            let mut row = vec![
                short_name(&holder.pod, &holder.pod_uid),
                clean(&holder.container),
                or_nothing(&cpus(holder)),
                or_nothing(&holder.memory_nodes),
            ];
            if wide {
                row.push(clean(&holder.pod_uid));
            }
            row
        };
        out.push_str(&table(&header, &reply.holders.iter().map(row).collect::<Vec<_>>()));
    }
    out
}

/// Returns the CPUs of a container. Those that it shares with others of its pod are marked.
fn cpus(holder: &CpuHolder) -> String {
    if holder.is_pod_shared && !holder.cpus.is_empty() {
        format!("{} (pod)", holder.cpus)
    } else {
        holder.cpus.clone()
    }
}

/// Returns a row for each NUMA node of each socket.
fn nodes(cpus: &[MachineCpu]) -> Vec<Vec<String>> {
    let mut nodes: BTreeMap<(u32, i64), Vec<&MachineCpu>> = BTreeMap::new();
    for cpu in cpus {
        nodes.entry((cpu.numa_node, cpu.socket)).or_default().push(cpu);
    }
    let row = |((node, socket), cpus): ((u32, i64), Vec<&MachineCpu>)| {
        let list = |condition: &dyn Fn(&MachineCpu) -> bool| {
            let cpus = cpus.iter().filter(|cpu| condition(cpu)).map(|cpu| cpu.number);
            or_nothing(&cpus.collect::<CpuList>().to_string())
        };
        let socket = if socket < 0 { NOTHING.to_owned() } else { socket.to_string() };
        vec![
            node.to_string(),
            socket,
            list(&|_| true),
            list(&|cpu| cpu.r#use() == CpuUse::Shared),
            list(&|cpu| cpu.r#use() == CpuUse::Exclusive),
            list(&|cpu| cpu.is_reserved),
        ]
    };
    nodes.into_iter().map(row).collect()
}

/// Returns the CPUs for JSON and YAML output.
fn data(reply: &ListCpusReply) -> Value {
    let policies = reply.policies.clone().unwrap_or_default();
    let cpu = |cpu: &MachineCpu| {
        let usage = match cpu.r#use() {
            CpuUse::Shared => "Shared",
            CpuUse::Exclusive => "Exclusive",
            CpuUse::System => "System",
            CpuUse::Unspecified => "Unknown",
        };
        json!({"number": cpu.number, "core": cpu.core, "socket": cpu.socket, "numaNode": cpu.numa_node, "use": usage, "reserved": cpu.is_reserved})
    };
    let memory = |m: &NodeMemory| json!({"numaNode": m.numa_node, "kind": m.kind, "allocatable": m.allocatable, "free": m.free});
    let holder = |h: &CpuHolder| json!({"pod": h.pod, "podUid": h.pod_uid, "container": h.container, "cpus": h.cpus, "memoryNodes": h.memory_nodes, "podShared": h.is_pod_shared, "podCpus": h.pod_cpus});
    json!({
        "policies": {"cpu": policies.cpu, "memory": policies.memory, "topology": policies.topology, "scope": policies.scope},
        "cpus": reply.cpus.iter().map(cpu).collect::<Vec<_>>(),
        "memory": reply.memory.iter().map(memory).collect::<Vec<_>>(),
        "holders": reply.holders.iter().map(holder).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use quintlet_proto::podsync::v1::ResourcePolicies;

    use super::*;

    fn cpu(number: u32, usage: CpuUse) -> MachineCpu {
        let numa_node = number / 4;
        MachineCpu {
            number,
            core: number / 2 * 2,
            socket: i64::from(numa_node),
            numa_node,
            r#use: usage.into(),
            is_reserved: number == 0,
        }
    }

    fn reply() -> ListCpusReply {
        use CpuUse::{Exclusive, Shared};
        let uses = [Shared, Exclusive, Exclusive, Shared, Shared, Shared, Exclusive, Shared];
        let text = |text: &str| text.to_owned();
        let holder = |pod: &str, cpus: &str, nodes: &str| CpuHolder {
            pod_uid: text("uid-1"),
            pod: text(pod),
            container: text("main"),
            cpus: text(cpus),
            memory_nodes: text(nodes),
            is_pod_shared: false,
            pod_cpus: String::new(),
        };
        let pool = CpuHolder { is_pod_shared: true, pod_cpus: text("4-6"), ..holder("a/pool", "4-5", "") };
        ListCpusReply {
            policies: Some(ResourcePolicies {
                cpu: text("static"),
                memory: text("Static"),
                topology: text("restricted"),
                scope: text("pod"),
            }),
            cpus: (0..).zip(uses).map(|(number, usage)| cpu(number, usage)).collect(),
            memory: vec![NodeMemory {
                numa_node: 0,
                kind: text("memory"),
                allocatable: 4 << 30,
                free: 1 << 30,
            }],
            holders: vec![holder("default/web", "1-2", "0"), holder("", "6", ""), pool],
        }
    }

    #[test]
    fn the_map_has_each_numa_node_and_the_cpus_of_each_container() {
        let expected = "\
CPU policy static, memory policy Static, topology policy restricted (scope pod)

NUMA NODE  SOCKET  CPUS  SHARED  EXCLUSIVE  RESERVED
0          0       0-3   0,3     1-2        0
1          1       4-7   4-5,7   6          –

NUMA NODE  MEMORY  ALLOCATABLE  FREE
0          memory  4096Mi       1024Mi

POD     CONTAINER  EXCLUSIVE CPUS  MEMORY NODES
web     main       1-2             0
uid-1   main       6               –
a/pool  main       4-5 (pod)       –
";
        assert_eq!(render(&reply(), false), expected);
        assert!(render(&reply(), true).contains("POD UID"));
        let value = data(&reply());
        assert_eq!(
            (&value["cpus"][1]["use"], &value["cpus"][0]["reserved"]),
            (&"Exclusive".into(), &true.into())
        );
        assert_eq!(value["holders"][0]["cpus"], "1-2");
        let pool = &value["holders"][2];
        assert_eq!((&pool["podShared"], &pool["podCpus"]), (&true.into(), &"4-6".into()));
        assert_eq!(value["policies"]["scope"], "pod");
    }

    #[test]
    fn a_node_without_policies_and_firmware_numbers_has_a_map() {
        let mut one = cpu(0, CpuUse::Shared);
        (one.socket, one.is_reserved) = (-1, false);
        let bare = render(&ListCpusReply { cpus: vec![one], ..ListCpusReply::default() }, false);
        assert!(bare.contains("0          –       0     0       –          –"), "{bare}");
    }
}
