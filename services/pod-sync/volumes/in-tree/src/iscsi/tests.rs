use serde_json::json;

use super::*;

fn source(change: serde_json::Value) -> IscsiSource {
    let mut object = json!({"targetPortal": "10.0.0.1", "iqn": "iqn.2017-05.com.example:a", "lun": 3});
    object.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    IscsiSource::from(&serde_json::from_value::<ISCSIVolumeSource>(object).unwrap())
}

#[test]
fn the_directory_and_the_names_of_a_disk_are_the_kubelets() {
    const A: &str = "iqn.2017-05.com.example:a";
    for (change, directory, name) in [
        (json!({}), format!("iface-default/10.0.0.1:3260-{A}-lun-3"), format!("10.0.0.1:{A}:3")),
        (
            json!({"targetPortal": "10.0.0.1:860", "iscsiInterface": "i0"}),
            format!("iface-i0/10.0.0.1:860-{A}-lun-3"),
            format!("10.0.0.1:860:{A}:3"),
        ),
        (
            json!({"targetPortal": "my-host-1", "iqn": "eui.1", "initiatorName": "iqn.x"}),
            "iface-my-host-1:3260:pv/my-host-1:3260-eui.1-lun-3".to_owned(),
            "my-host-1:eui.1:3".to_owned(),
        ),
        (
            json!({"targetPortal": "[fd00::1]:3260", "portals": ["10.0.0.2"]}),
            format!("iface-default/[fd00::1]:3260-{A}-lun-3"),
            format!("[fd00::1]:3260:{A}:3"),
        ),
    ] {
        let source = source(change);
        let disk = source.disk("pv");
        assert_eq!((disk.directory(), source.unique_name()), (directory.clone(), name));
        let found = Disk::of_directory(&directory).unwrap();
        assert_eq!((&found.portals[0], &found.iqn, &found.lun), (&disk.portals[0], &disk.iqn, &disk.lun));
        assert_eq!((found.directory(), &found.iface), (directory, &disk.iface));
    }
    for broken in [
        "iface-default",
        "default/10.0.0.1:3260-iqn.x-lun-1",
        "iface-x/10.0.0.1-lun-1",
        "iface-x/a-iqn.b-lun-c",
    ] {
        assert_eq!(Disk::of_directory(broken), None, "{broken}");
    }
}

#[test]
fn the_file_of_a_disk_is_the_kubelets_and_has_no_credentials() {
    let disk = source(json!({"portals": ["10.0.0.2:860"], "initiatorName": "iqn.me"})).disk("pv");
    let written = concat!(
        r#"{"VolName":"pv","Portals":["10.0.0.1:3260","10.0.0.2:860"],"Iqn":"iqn.2017-05.com.example:a","Lun":"3","#,
        r#""InitIface":"default","Iface":"10.0.0.1:3260:pv","InitiatorName":"iqn.me","MetricsProvider":null}"#
    );
    assert_eq!(serde_json::to_string(&disk).unwrap(), written);
    assert_eq!(serde_json::from_str::<Disk>(written).unwrap(), disk);
    assert!(disk.has_own_iface() && disk.names_own_iface());
    let default = source(json!({})).disk("pv");
    assert!(!default.has_own_iface() && !default.names_own_iface());
}

#[test]
fn a_link_is_that_of_the_portal_and_lun() {
    let disk = source(json!({})).disk("pv");
    let tcp = "ip-10.0.0.1:3260-iscsi-iqn.2017-05.com.example:a-lun-3";
    let offloaded = format!("pci-0000:04:00.5-{tcp}");
    assert!(disk.is_path(tcp, "10.0.0.1:3260", "tcp") && disk.is_path(&offloaded, "10.0.0.1:3260", "bnx2i"));
    for (name, portal, transport) in [
        (tcp, "10.0.0.2:3260", "tcp"),
        (tcp, "10.0.0.1:3260", "bnx2i"),
        (&offloaded, "10.0.0.1:3260", "tcp"),
        (&format!("{tcp}1"), "10.0.0.1:3260", "tcp"),
        (&format!("{tcp}-part1"), "10.0.0.1:3260", "tcp"),
    ] {
        assert!(!disk.is_path(name, portal, transport), "{name} {portal} {transport}");
    }
    let disk = source(json!({"iqn": "iqn.x"})).disk("pv");
    assert!(disk.is_path("ip-fd00::1:3260-iscsi-iqn.x-lun-3", "[fd00::1]:3260", "tcp"));
}

#[test]
fn a_session_is_busy_if_another_volume_may_use_it() {
    let other = |first: &str, portals: Option<&[&str]>, lun: &str| Other {
        first_portal: first.to_owned(),
        portals: portals.map(|all| all.iter().map(|mounted| (*mounted).to_owned()).collect()),
        lun: lun.to_owned(),
    };
    for (others, luns, expected) in [
        (vec![], &["1"][..], false),
        (vec![other("p1", None, "1")], &[], true),
        (vec![other("p2", Some(&["p2", "p1"]), "1")], &[], true),
        (vec![other("p2", Some(&["p2"]), "1")], &["1"], false),
        // The file of a mounted volume is not readable: its device shows whether it uses the session.
        (vec![other("p2", None, "1")], &["1"], true),
        (vec![other("p2", None, "1")], &["2"], false),
    ] {
        let luns = luns.iter().map(|lun| (*lun).to_owned()).collect();
        assert_eq!(is_busy("p1", &luns, &others), expected, "{others:?} {luns:?}");
    }
}

const RECORD: &str = "# BEGIN RECORD 2.1.8\niface.iscsi_ifacename = i0\niface.net_ifacename = <empty>\n\
                      iface.hwaddress = 00:11:22:33:44:55\niface.transport_name = be2iscsi\niface.mtu = 1500\n# END RECORD\n";

#[test]
fn the_record_of_an_interface_has_its_transport_and_what_a_copy_gets() {
    assert_eq!(transport(RECORD), Some("be2iscsi"));
    assert_eq!(transport("iface.transport_name = <empty>\n"), Some("tcp"));
    assert_eq!(transport("# BEGIN RECORD\n"), None);
    let settings = settings(RECORD).unwrap();
    let settings: Vec<_> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(
        settings,
        ["iface.hwaddress=00:11:22:33:44:55", "iface.mtu=1500", "iface.transport_name=be2iscsi"]
    );
    let error = super::settings("iface.mtu = 15 00\n").unwrap_err();
    assert_eq!(error, "error: invalid iface setting: [iface.mtu = 15 00]");
}

#[test]
fn the_arguments_are_the_kubelets() {
    let disk = source(json!({"iqn": "iqn.x", "iscsiInterface": "i0"})).disk("pv");
    for (arguments, expected) in [
        (arguments::iface("i0", "show"), "-m iface -I i0 -o show"),
        (arguments::set_iface("i0", "k", "v"), "-m iface -I i0 -o update -n k -v v"),
        (arguments::discovery(&disk, "p", "new"), "-m discoverydb -t sendtargets -p p -I i0 -o new"),
        (
            arguments::set_discovery(&disk, "p", "k", "v"),
            "-m discoverydb -t sendtargets -p p -I i0 -o update -n k -v v",
        ),
        (arguments::discover(&disk, "p"), "-m discoverydb -t sendtargets -p p -I i0 --discover"),
        (arguments::set_node(&disk, "p", "k", "v"), "-m node -p p -T iqn.x -I i0 -o update -n k -v v"),
        (arguments::login(&disk, "p"), "-m node -p p -T iqn.x -I i0 --login"),
        (arguments::logout(&disk, "p"), "-m node -p p -T iqn.x -I i0 --logout"),
        (arguments::delete_node(&disk, "p"), "-m node -p p -T iqn.x -I i0 -o delete"),
    ] {
        assert_eq!(arguments.join(" "), expected);
    }
}

#[test]
fn credentials_are_not_shown() {
    let chap = Chap(BTreeMap::from([
        ("node.session.auth.password".to_owned(), "s3cret".to_owned()),
        ("node.session.auth.username".to_owned(), String::new()),
    ]));
    assert_eq!(format!("{chap:?}"), r#"["node.session.auth.password", "node.session.auth.username"]"#);
    assert_eq!(chap.redact("bad value s3cret"), "bad value <redacted>");
}

#[test]
fn the_secret_of_a_persistent_volume_may_be_in_another_namespace() {
    let chap = json!({"chapAuthDiscovery": true, "chapAuthSession": true, "secretRef": {"name": "s"}});
    let of_pod = source(chap);
    assert!(of_pod.chap_discovery && of_pod.chap_session);
    assert_eq!(of_pod.secret, Some(SecretRef { namespace: None, name: "s".to_owned() }));
    let of_volume = |secret: serde_json::Value| {
        let object = json!({"targetPortal": "10.0.0.1", "iqn": "iqn.x", "lun": 0, "secretRef": secret});
        IscsiSource::from(&serde_json::from_value::<ISCSIPersistentVolumeSource>(object).unwrap()).secret
    };
    let named = |namespace: Option<&str>| {
        Some(SecretRef { namespace: namespace.map(str::to_owned), name: "s".to_owned() })
    };
    assert_eq!(of_volume(json!({"name": "s", "namespace": "other"})), named(Some("other")));
    assert_eq!(of_volume(json!({"name": "s", "namespace": ""})), named(None));
    assert_eq!(of_volume(json!({"name": ""})), None);
}
