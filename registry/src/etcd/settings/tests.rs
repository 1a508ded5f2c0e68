use super::*;

fn read_url(text: &str) -> Result<EtcdSettings, RegistryError> {
    EtcdSettings::from_url(&RegistryUrl::parse(text)?)
}

#[test]
fn defaults_are_filled_in() {
    let settings = read_url("etcd://one,two:9,[::1],[::1]:9").expect("it is right");
    assert_eq!(settings.endpoints, ["one:2379", "two:9", "[::1]:2379", "[::1]:9"]);
    assert_eq!((settings.cluster.as_str(), settings.user, settings.tls), ("default", None, None));
    assert_eq!(settings.ttl, TTL);
}

#[test]
fn everything_can_be_said() {
    let text = "etcd://me:secret@one/blue?ca=/ca&cert=/cert&key=/key&server_name=etcd&ttl_s=5";
    let settings = read_url(text).expect("it is right");
    assert_eq!((settings.cluster.as_str(), settings.ttl), ("blue", Duration::from_secs(5)));
    assert_eq!(settings.user, Some(User { name: "me".to_owned(), password: "secret".to_owned() }));
    let tls = TlsFiles {
        ca: "/ca".into(),
        identity: Some(("/cert".into(), "/key".into())),
        server_name: Some("etcd".to_owned()),
    };
    assert_eq!(settings.tls, Some(tls));
    assert!(!format!("{:?}", read_url(text)).contains("secret"));
}

#[test]
fn a_password_can_be_in_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("password");
    std::fs::write(&file, "from the file\n").expect("writable");
    let settings = read_url(&format!("etcd://me@one?password_file={}", file.display())).expect("it is right");
    assert_eq!(settings.user.expect("me").password, "from the file");
    let error = read_url("etcd://me@one?password_file=/nowhere").expect_err("there is no such file");
    assert_eq!(error.to_string(), "read /nowhere");
}

#[test]
fn contradictions_are_refused() {
    for (text, reason) in [
        ("etcd://a/b/c", "`b/c` is not a cluster: letters, digits and any of - _ . only"),
        ("etcd://a?cert=/c", "`cert` needs `key`, and `key` needs `cert`"),
        ("etcd://a?cert=/c&key=/k", "TLS needs a `ca`"),
        ("etcd://a?server_name=x", "TLS needs a `ca`"),
        ("etcd://a?password_file=/p", "`password_file` needs a user before the @"),
        ("etcd://u:p@a?password_file=/p", "give either a password or a `password_file`"),
        ("etcd://a?ttl_s=0", "`ttl_s` is 1 to 600 seconds, not `0`"),
        ("etcd://a?ttl_s=soon", "`ttl_s` is 1 to 600 seconds, not `soon`"),
        ("etcd://a?tls=yes", "`tls` is not known, only ca, cert, key, server_name, password_file, ttl_s"),
    ] {
        let error = read_url(text).expect_err(text).to_string();
        assert!(error.ends_with(reason), "{text}: {error}");
    }
}

#[test]
fn missing_certificates_are_found_at_once() {
    let settings = read_url("etcd://a?ca=/nowhere/ca.pem").expect("the address is right");
    assert_eq!(settings.check().expect_err("no such file").to_string(), "read /nowhere/ca.pem");
}
