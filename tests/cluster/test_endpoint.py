"""The address and the interface by which this machine reaches another one."""

import socket

import psutil

from torchmars.cluster.endpoint import interface_of, local_address


def test_the_interface_of_an_address():
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                assert interface_of(each.address) == name
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None  # kept for documentation: no machine's


def test_a_loopback_address_is_none_that_others_know():
    assert local_address("127.0.0.1", 80) is None
